"""What a quantization may be told, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from edgellama.errors import UsageError
from edgellama.gguf_io import GGMLType, Typed, ValueType
from edgellama.quantize.choice import Decision, Overrides


@dataclass(frozen=True, slots=True)
class Options:
    """llama-quantize's options and ours; the defaults are llama-quantize's."""

    recipe: str = "Q4_K_M"
    overrides: Overrides = field(default_factory=Overrides)
    imatrix: Path | None = None
    include_weights: tuple[str, ...] = ()
    exclude_weights: tuple[str, ...] = ()
    prune_layers: tuple[int, ...] = ()
    override_kv: tuple[str, ...] = ()
    keep_split: bool = False
    split_max_bytes: int | None = None
    allow_requantize: bool = False
    protect: str | None = None
    """Name of a rule in `protect.PROTECTIONS`."""
    types: Mapping[str, GGMLType] = field(default_factory=dict)
    """Types of tensors by their full names, before all rules."""
    threads: int = 0
    """0 takes every core this process may use."""
    resume: bool = False


@dataclass(slots=True)
class Result:
    """A finished (or, for a dry run, planned) quantization."""

    bytes: int
    source_bytes: int
    parameters: int
    seconds: float
    types: dict[str, int]
    """Tensors per type."""
    decisions: list[Decision] = field(repr=False)
    paths: list[Path]
    fallback_bytes: int = 0
    """Bytes that falling back to other types costs over the recipe's own."""
    warnings: list[str] = field(default_factory=list)

    @property
    def bits_per_weight(self) -> float:
        """Bits of tensor data per parameter."""
        return self.bytes * 8 / self.parameters


def parse_override(text: str) -> tuple[str, object]:
    """`KEY=int:5`, `float:`, `bool:` or `str:` as llama.cpp reads it -> key and typed value. Raises UsageError."""
    key, separator, rest = text.partition("=")
    kind, colon, value = rest.partition(":")
    if not separator or not colon or not key or len(key.encode()) >= 128:
        raise UsageError(f"--override-kv {text!r} is not KEY=TYPE:VALUE", "TYPE is int, float, bool or str")
    try:
        if kind == "int":
            return key, Typed(abs(int(value)) & 0xFFFFFFFF, ValueType.UINT32)
        if kind == "float":
            return key, Typed(float(value), ValueType.FLOAT32)
    except ValueError:
        raise UsageError(f"--override-kv {text!r}: {value!r} is no {kind}") from None
    if kind == "bool" and value in {"true", "false"}:
        return key, Typed(value == "true", ValueType.BOOL)
    if kind == "str" and len(value.encode()) <= 127:
        return key, Typed(value, ValueType.STRING)
    raise UsageError(f"--override-kv {text!r} is not understood", "int, float, bool (true, false) or str (127 bytes)")
