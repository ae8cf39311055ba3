"""SmolLM3: a Llama that leaves RoPE out of every fourth layer."""

from edgellama.engine.jit.families.base import Family
from edgellama.gguf_io import Header


def _rotated(header: Header) -> tuple[bool, ...]:
    return tuple((layer + 1) % 4 != 0 for layer in range(header.layers))


FAMILY = Family(layout="interleaved", rotated=_rotated)
