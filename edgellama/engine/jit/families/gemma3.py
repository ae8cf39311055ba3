"""Gemma 3: like Gemma 2 with normalized heads instead of caps; five layers of six have a window and their own RoPE
base. arXiv 2503.19786."""

from edgellama.engine.jit.families.base import Family, head_size_scale, no_windows, pattern_windows
from edgellama.engine.jit.families.gemma import embedding_scale
from edgellama.gguf_io import Header

_LAYERS_27B = 62
"""The only size whose scores are scaled by the embedding per head instead of the head size."""


def _attention_scale(header: Header) -> float:
    if header.layers == _LAYERS_27B:
        return float((header.embedding_length // header.head_counts[0]) ** -0.5)
    return head_size_scale(header)


def _windows(header: Header) -> tuple[int, ...]:
    window = header.number("attention.sliding_window")
    return pattern_windows(header, window, 6) if window else no_windows(header)


FAMILY = Family(
    layout="half",
    activation="gelu",
    embedding_scale=embedding_scale,
    attention_post_norm="post_attention_norm",
    feed_forward_post_norm="post_ffw_norm",
    head_norms=True,
    attention_scale=_attention_scale,
    final_softcap=lambda header: header.real("final_logit_softcapping"),
    windows=_windows,
    window_base=lambda header: header.real("rope.freq_base_swa", 10000.0),
)
