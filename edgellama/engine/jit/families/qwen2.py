"""Qwen 1.5 and 2: biases on queries, keys and values. arXiv 2407.10671."""

from edgellama.engine.jit.families.base import Family

FAMILY = Family(layout="half")
