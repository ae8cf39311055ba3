"""MiniCPM: a Llama with constant multipliers, which older files leave out. arXiv 2404.06395."""

from edgellama.engine.jit.families.base import Family
from edgellama.gguf_io import Header


def _inverse_logit_scale(header: Header) -> float:
    return 1.0 / header.real("logit_scale", 256.0 / header.embedding_length)


FAMILY = Family(
    layout="interleaved",
    embedding_scale=lambda header: header.real("embedding_scale", 12.0),
    residual_scale=lambda header: header.real("residual_scale", 1.4 / header.layers**0.5),
    logit_scale=_inverse_logit_scale,
)
