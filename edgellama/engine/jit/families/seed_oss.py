"""Seed-OSS: a Qwen 2 whose second norm has another name."""

from edgellama.engine.jit.families.base import Family

FAMILY = Family(layout="half", feed_forward_norm="post_attention_norm")
