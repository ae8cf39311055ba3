"""Qwen 1.5 and 2 with experts and one shared expert behind a gate; expert weights are not normalized."""

from edgellama.engine.jit.families.base import Family

FAMILY = Family(layout="half", normalized_experts=False, experts_required=True)
