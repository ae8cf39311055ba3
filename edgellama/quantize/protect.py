"""Our own additions to llama.cpp's recipes, as data: what `--protect` keeps at a higher precision."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from edgellama.errors import UsageError
from edgellama.gguf_io import GGMLType as T
from edgellama.gguf_io.types import BLOCKS
from edgellama.quantize.choice import Decision, category, tensor_order


@dataclass(frozen=True, slots=True)
class Protection:
    """Least types: for embeddings and output, and for attention in the first and last `layers` layers."""

    name: str
    embeddings: T
    attention: T
    layers: int
    note: str


PROTECTIONS = {
    p.name: p
    for p in (
        Protection("q8", T.Q8_0, T.Q6_K, 2, "embeddings and output Q8_0, attention of the 2 outermost layers Q6_K"),
        Protection("f16", T.F16, T.Q8_0, 2, "embeddings and output F16, attention of the 2 outermost layers Q8_0"),
    )
}
DEFAULT = "q8"
_ATTENTION = frozenset({"q", "k", "v", "qkv", "kv_b", "attn_output"})


def protection(name: str) -> Protection:
    """By name; raises UsageError."""
    if name not in PROTECTIONS:
        raise UsageError(f"--protect {name} is not known", f"known are {', '.join(PROTECTIONS)}")
    return PROTECTIONS[name]


def protect(decisions: Iterable[Decision], rule: Protection, layers: int) -> list[Decision]:
    """Raise what the rule protects; nothing gets smaller, and tensors that keep the source's type stay."""
    return [_raised(decision, rule, layers) for decision in decisions]


def _raised(decision: Decision, rule: Protection, layers: int) -> Decision:
    tensor, kind = decision.tensor, category(decision.tensor.name)
    if decision.type is tensor.type:
        return decision
    layer = tensor_order(tensor.name)[0]
    outermost = 0 <= layer < rule.layers or layers - rule.layers <= layer < layers
    least = rule.embeddings if kind in {"embedding", "output"} else rule.attention
    if kind not in {"embedding", "output"} and not (outermost and kind in _ATTENTION):
        return decision
    if _bits(least) <= _bits(decision.type) or tensor.shape[0] % BLOCKS[least][0]:
        return decision
    return replace(decision, type=least, wanted=least)


def _bits(kind: T) -> float:
    block, size = BLOCKS[kind]
    return size * 8 / block
