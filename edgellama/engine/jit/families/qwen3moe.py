"""Qwen 3 with experts. arXiv 2505.09388."""

from edgellama.engine.jit.families.base import Family

FAMILY = Family(layout="half", head_norms=True, experts_required=True)
