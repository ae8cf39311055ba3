"""Granite: four constant multipliers on a Llama. Dense or with experts and a shared expert."""

from edgellama.engine.jit.families.base import Family, given_scale
from edgellama.gguf_io import Header


def _inverse_logit_scale(header: Header) -> float:
    return 1.0 / (header.real("logit_scale") or 1.0)


def _rotated(header: Header) -> tuple[bool, ...]:
    """Granite files use this key as a switch for RoPE."""
    return (bool(header.get("{arch}.rope.scaling.finetuned", True)),) * header.layers


FAMILY = Family(
    layout="interleaved",
    rotated=_rotated,
    embedding_scale=lambda header: header.real("embedding_scale") or 1.0,
    residual_scale=lambda header: header.real("residual_scale") or 1.0,
    logit_scale=_inverse_logit_scale,
    attention_scale=given_scale,
)
