"""Llama 1 to 3, Mistral, Mixtral and the many models that took their shape. Touvron et al. 2023, arXiv 2302.13971."""

from edgellama.engine.jit.families.base import Family

FAMILY = Family(layout="interleaved")
