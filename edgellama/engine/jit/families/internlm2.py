"""InternLM 2: a Llama. arXiv 2403.17297."""

from edgellama.engine.jit.families.base import Family

FAMILY = Family(layout="interleaved")
