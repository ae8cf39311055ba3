"""What tells one family of models from another, over the block they share (`engine/jit/block.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from edgellama.gguf_io import Header
from edgellama.rope import Layout


def no_windows(header: Header) -> tuple[int, ...]:
    """Every layer sees the whole sequence."""
    return (0,) * header.layers


def pattern_windows(header: Header, window: int, pattern: int) -> tuple[int, ...]:
    """`window` tokens in every layer but each `pattern`-th, unless the file names the layers itself."""
    stored = header.get("{arch}.attention.sliding_window_pattern")
    if isinstance(stored, tuple):
        return tuple(window if flag else 0 for flag in stored[: header.layers])
    if isinstance(stored, int) and not isinstance(stored, bool):
        pattern = stored
    return tuple(window if not pattern or layer % pattern < pattern - 1 else 0 for layer in range(header.layers))


def head_size_scale(header: Header) -> float:
    """1 / sqrt(head size)."""
    return float(header.key_length**-0.5)


def given_scale(header: Header) -> float:
    """`attention.scale` of the file, else 1 / sqrt(head size)."""
    return header.real("attention.scale") or head_size_scale(header)


def every_layer(header: Header) -> tuple[bool, ...]:
    """Every layer rotates queries and keys."""
    return (True,) * header.layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Differences between families. Tensor names are those of GGUF, without `blk.N.` and `.weight`."""

    layout: Layout
    """Which values RoPE pairs."""
    activation: Literal["silu", "gelu"] = "silu"
    """Of the gate; `gelu` is the tanh approximation."""
    attention_norm: str = "attn_norm"
    """Norm in front of the attention; empty for none."""
    attention_post_norm: str = ""
    """Norm of the attention's result, before it joins the residual stream."""
    feed_forward_norm: str = "ffn_norm"
    feed_forward_post_norm: str = ""
    head_norms: bool = False
    """Queries and keys are normalized before RoPE, per head or whole as the tensors' lengths say."""
    normalized_experts: bool = True
    """The weights of the chosen experts are divided by their sum."""
    embedding_scale: Callable[[Header], float] = lambda _: 1.0
    residual_scale: Callable[[Header], float] = lambda _: 1.0
    logit_scale: Callable[[Header], float] = lambda _: 1.0
    """Factor of the logits."""
    attention_scale: Callable[[Header], float] = head_size_scale
    attention_softcap: Callable[[Header], float] = lambda _: 0.0
    """Caps attention scores at +-cap by tanh; 0 for none."""
    final_softcap: Callable[[Header], float] = lambda _: 0.0
    windows: Callable[[Header], tuple[int, ...]] = no_windows
    """Tokens each layer sees, itself included; 0 for all."""
    rotated: Callable[[Header], tuple[bool, ...]] = every_layer
    """Layers that use RoPE."""
    window_base: Callable[[Header], float | None] = lambda _: None
    """RoPE base of layers with a window, without the file's scaling; None for the same rotation as the others."""
    experts_required: bool = False
