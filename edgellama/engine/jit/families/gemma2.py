"""Gemma 2: norms on both sides, capped scores and logits, a window in every other layer. arXiv 2408.00118."""

from edgellama.engine.jit.families.base import Family, head_size_scale, pattern_windows
from edgellama.engine.jit.families.gemma import embedding_scale
from edgellama.gguf_io import Header

_LAYERS_27B = 46
"""The only size whose scores are scaled by the embedding per head instead of the head size."""


def _attention_scale(header: Header) -> float:
    if header.layers == _LAYERS_27B:
        return float((header.embedding_length // header.head_counts[0]) ** -0.5)
    return head_size_scale(header)


def _windows(header: Header) -> tuple[int, ...]:
    return pattern_windows(header, header.number("attention.sliding_window", 4096), 2)


FAMILY = Family(
    layout="half",
    activation="gelu",
    embedding_scale=embedding_scale,
    attention_post_norm="post_attention_norm",
    feed_forward_post_norm="post_ffw_norm",
    attention_scale=_attention_scale,
    attention_softcap=lambda header: header.real("attn_logit_softcapping", 50.0),
    final_softcap=lambda header: header.real("final_logit_softcapping", 30.0),
    windows=_windows,
)
