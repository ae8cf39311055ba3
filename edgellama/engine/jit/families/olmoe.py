"""OLMoE: experts whose weights are not normalized, norms over whole queries and keys. arXiv 2409.02060."""

from edgellama.engine.jit.families.base import Family

FAMILY = Family(layout="half", head_norms=True, normalized_experts=False, experts_required=True)
