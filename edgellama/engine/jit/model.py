"""A model ready to compute: its family's declarations applied to one file's numbers and tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from edgellama.engine.base import LoraAdapter
from edgellama.engine.jit.families import family
from edgellama.engine.jit.families.base import Family
from edgellama.engine.jit.lora import Pair, load_adapters
from edgellama.engine.jit.weights import Weight, load_weights
from edgellama.errors import UnsupportedError
from edgellama.gguf_io import Header, read, require_model
from edgellama.rope import Rope
from edgellama.rope.gguf import Factors, from_gguf

_SAMPLE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """Sizes of one layer and its tensors, by their names without `blk.N.`."""

    index: int
    heads: int
    heads_kv: int
    window: int
    """Tokens it sees, 0 for all."""
    rope: int
    """Index into `Model.ropes`, -1 for none."""
    tensors: dict[str, Weight]

    def __getitem__(self, name: str) -> Weight:
        return self.tensors[name]

    def get(self, name: str) -> Weight | None:
        """A tensor that may be missing."""
        return self.tensors.get(name)


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """Everything `block.forward` needs."""

    header: Header
    family: Family
    layers: tuple[Layer, ...]
    tensors: dict[str, Weight]
    """Tensors outside the layers."""
    ropes: tuple[Rope, ...]
    context_tokens: int
    key_length: int
    value_length: int
    epsilon: float
    experts_used: int
    adapters: dict[str, tuple[Pair, ...]] = field(repr=False)
    """LoRA pairs by the name of the matrix they change."""
    identity: bytes
    """Hash over header and a sample of the weights; part of saved states."""

    @property
    def embedding_length(self) -> int:
        return self.header.embedding_length

    @property
    def vocabulary_tokens(self) -> int:
        return self.tensors["token_embd.weight"].rows

    @property
    def output(self) -> Weight:
        """The matrix that makes logits; many models share it with the embedding."""
        return self.tensors.get("output.weight") or self.tensors["token_embd.weight"]


def load_model(
    path: str,
    context_tokens: int,
    *,
    mapped: bool = True,
    loras: tuple[LoraAdapter, ...] = (),
    on_progress: Callable[[float], None] | None = None,
) -> Model:
    """Validate, map and arrange a GGUF file for contexts of `context_tokens` per sequence, 0 for the trained one.

    Raises what `gguf_io.read` and `load_adapters` raise, and `UnsupportedError` for what this engine does not compute.
    """
    header = read(path)
    require_model(header)
    chosen = family(header.architecture)
    if chosen.experts_required and not header.number("expert_count"):
        raise UnsupportedError(f"{path}: a {header.architecture} model without experts")
    names = {tensor.name for tensor in header.tensors}
    if any(name.replace("_up_", "_gate_") not in names for name in names if name.endswith(".ffn_up_exps.weight")):
        raise UnsupportedError("the JIT engine needs experts with a gate", "use the engine llamacpp")
    tensors = load_weights(header, mapped=mapped, on_tensor=on_progress or (lambda _: None))
    if not header.value_length == header.key_length:
        raise UnsupportedError(
            f"the JIT engine needs keys and values of one length, not {header.key_length} and {header.value_length}",
            "use the engine llamacpp",
        )
    tokens = context_tokens or header.context_tokens
    ropes, layers = _layers(header, chosen, tensors, tokens)
    return Model(
        header=header,
        family=chosen,
        layers=layers,
        tensors={name: weight for name, weight in tensors.items() if not name.startswith("blk.")},
        ropes=ropes,
        context_tokens=tokens,
        key_length=header.key_length,
        value_length=header.value_length,
        epsilon=header.real("attention.layer_norm_rms_epsilon"),
        experts_used=header.number("expert_used_count"),
        adapters=load_adapters(loras, header, tensors),
        identity=_identity(header, tensors),
    )


def _layers(
    header: Header, chosen: Family, tensors: dict[str, Weight], context_tokens: int
) -> tuple[tuple[Rope, ...], tuple[Layer, ...]]:
    count = header.layers - header.number("nextn_predict_layers")
    windows, rotated = chosen.windows(header), chosen.rotated(header)
    window_base = chosen.window_base(header)
    ropes = [_rope(header, chosen, tensors, context_tokens)]
    if window_base is not None and any(windows):
        ropes.append(_rope(header, chosen, tensors, context_tokens, window_base))
    grouped: list[dict[str, Weight]] = [{} for _ in range(header.layers)]
    for name, weight in tensors.items():
        if name.startswith("blk."):
            number, _, rest = name.removeprefix("blk.").partition(".")
            grouped[int(number)][rest] = weight
    layers = []
    for index in range(count):
        rope = -1 if not rotated[index] else len(ropes) - 1 if windows[index] else 0
        layers.append(
            Layer(index, header.head_counts[index], header.head_counts_kv[index], windows[index], rope, grouped[index])
        )
    return tuple(ropes), tuple(layers)


def _rope(
    header: Header, chosen: Family, tensors: dict[str, Weight], context_tokens: int, window_base: float | None = None
) -> Rope:
    def vector(name: str) -> object:
        return tensors[name].vector() if name in tensors else None

    names = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
    factors = Factors(*(vector(name) for name in names)) if window_base is None else None  # type: ignore[arg-type]
    return from_gguf(
        lambda key, default: header.get(f"{{arch}}.{key}", default),
        header.number("rope.dimension_count", header.key_length),
        chosen.layout,
        context_tokens,
        factors=factors,
        base=window_base,
        scaled=window_base is None,
    )


def _identity(header: Header, tensors: dict[str, Weight]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in header.tensors:
        digest.update(f"{tensor.name} {tensor.shape} {tensor.type.name}\n".encode())
    for key, value in header.metadata.items():
        if key.startswith(header.architecture + "."):
            digest.update(f"{key}={value}\n".encode())
    for name in ("token_embd.weight", "output_norm.weight", "blk.0.attn_q.weight", "blk.0.attn_qkv.weight"):
        if name in tensors:
            digest.update(tensors[name].data.reshape(-1)[:_SAMPLE_BYTES].tobytes())
    return digest.digest()
