"""Qwen 3: queries and keys normalized per head. arXiv 2505.09388."""

from edgellama.engine.jit.families.base import Family

FAMILY = Family(layout="half", head_norms=True)
