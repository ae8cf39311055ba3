"""Phi 3 and 4: fused projections, LongRoPE. The window that files of Phi 3 mini declare is not applied, as in
llama.cpp. arXiv 2404.14219."""

from edgellama.engine.jit.families.base import Family

FAMILY = Family(layout="half")
