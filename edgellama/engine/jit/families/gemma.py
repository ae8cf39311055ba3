"""Gemma 1: scaled embeddings and GELU. The file holds norm weights with 1 already added. arXiv 2403.08295."""

from edgellama.engine.jit.families.base import Family
from edgellama.gguf_io import Header


def embedding_scale(header: Header) -> float:
    """sqrt(embedding length)."""
    return float(header.embedding_length**0.5)


FAMILY = Family(layout="half", activation="gelu", embedding_scale=embedding_scale)
