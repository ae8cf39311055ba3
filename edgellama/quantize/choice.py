"""Which type each tensor gets: llama.cpp's rules, its counters and their order included.

Written from the behaviour of llama-quant.cpp of the pinned llama.cpp. Tensors must come in its order (`tensor_order`),
since the counters advance with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from edgellama.errors import InvalidFileError, UsageError
from edgellama.gguf_io import GGMLType as T
from edgellama.gguf_io import TensorInfo
from edgellama.gguf_io.types import BLOCKS
from edgellama.quantize.recipes import NEEDS_IMPORTANCE, Recipe

_LAYER = re.compile(r"blk\.(\d+)\.")
_CATEGORIES = (  # first match wins; all but the first two are substrings
    ("qkv", "attn_qkv.weight"),
    ("kv_b", "attn_kv_b.weight"),
    ("v", "attn_v.weight"),
    ("k", "attn_k.weight"),
    ("q", "attn_q.weight"),
    ("attn_output", "attn_output.weight"),
    ("up", "ffn_up"),
    ("gate", "ffn_gate"),
    ("down", "ffn_down"),
)
_V_LIKE = frozenset({"v", "qkv", "kv_b"})
_EMBEDDINGS = frozenset({"token_embd.weight", "per_layer_token_embd.weight"})
_KEPT_PARTS = (
    "_norm.weight", "ffn_gate_inp.weight", "ffn_gate_tid2eid.weight", "altup", "laurel", "per_layer_model_proj",
    "ssm_conv1d", "shortconv.conv.weight", "indexer.k_proj.weight", "indexer.q_proj.weight", "time_mix_first.weight",
    "time_mix_w0.weight", "time_mix_w1.weight", "time_mix_w2.weight", "time_mix_v0.weight", "time_mix_v1.weight",
    "time_mix_v2.weight", "time_mix_a0.weight", "time_mix_a1.weight", "time_mix_a2.weight", "time_mix_g1.weight",
    "time_mix_g2.weight", "time_mix_decay_w1.weight", "time_mix_decay_w2.weight", "time_mix_lerp_fused.weight",
    "attn_rel_b.weight", ".position_embd", "sam.pos_embd", "sam.neck.", "sam.net_", ".rel_pos", ".patch_embd",
    ".patch_merger", "a.rvq.codebook", "mm.a.code_embd",
)  # fmt: skip
_KEPT_GLM5_NEXT = (
    "hc_", "indexer.attn_q_b", "indexer.attn_k", "indexer.proj", "indexer_compressor_gate", "indexer_compressor_ape",
    "ssm_f_a.weight", "ssm_f_b.weight", "ssm_g_a.weight", "ssm_g_b.weight", "ssm_beta.weight", "attn_kv_a_mqa.weight",
    "attn_k_b.weight", "attn_v_b.weight",
)  # fmt: skip
_FLOATS = frozenset({T.F32, T.F16, T.BF16})
_LOW_IQ = frozenset({"IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ1_S", "IQ1_M"})
_FALLBACKS = {
    **dict.fromkeys((T.IQ1_S, T.IQ1_M, T.IQ2_XXS, T.IQ2_XS, T.IQ2_S, T.IQ3_XXS, T.IQ3_S, T.IQ4_XS), T.IQ4_NL),
    **dict.fromkeys((T.Q2_0, T.Q2_K, T.Q3_K, T.TQ1_0, T.TQ2_0), T.Q4_0),
    T.Q4_K: T.Q5_0,
    T.Q5_K: T.Q5_1,
    T.Q6_K: T.Q8_0,
}


@dataclass(frozen=True, slots=True)
class Model:
    """What the rules ask of a model."""

    architecture: str
    layers: int
    experts: int = 0
    heads: int = 0
    heads_kv: int = 0

    @property
    def gqa(self) -> int:
        """Query heads per KV head of layer 0, 0 without KV heads."""
        return self.heads // self.heads_kv if self.heads_kv else 0

    @property
    def is_70b(self) -> bool:
        """Whether llama.cpp takes the model for a 70B, by its layer count."""
        if self.architecture == "llama":
            return self.layers == 80 and self.heads != self.heads_kv
        return (self.architecture, self.layers) in {("qwen2", 80), ("deci", 80), ("olmo", 80), ("jais2", 68)}


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the user decided: llama-quantize's options."""

    pure: bool = False
    leave_output: bool = False
    output_type: T | None = None
    embedding_type: T | None = None
    patterns: tuple[tuple[str, T], ...] = ()
    """(regular expression, type) in order; the first that is found in a tensor's name wins."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One tensor's type. `wanted` differs from `type` where its rows do not divide into blocks."""

    tensor: TensorInfo
    type: T
    wanted: T
    needs_importance: bool
    by_pattern: bool = False
    """Whether a --tensor-type pattern decided."""

    @property
    def fell_back(self) -> bool:
        """Whether the shape forced another type."""
        return self.type != self.wanted


def tensor_order(name: str) -> tuple[int, bytes]:
    """Sort key of llama.cpp's tensor map: layer (-1 outside of layers), then name by bytes."""
    match = re.match(r"blk\.(\d+)\.", name)
    return (int(match[1]) if match else -1, name.encode())


def category(name: str) -> str:
    """The kind of weight a name stands for."""
    if name == "output.weight":
        return "output"
    if name in _EMBEDDINGS:
        return "embedding"
    return next((kind for kind, part in _CATEGORIES if part in name), "other")


def dimensions(shape: Sequence[int]) -> int:
    """Dimensions without trailing ones, at least 1: ggml's count."""
    count = len(shape)
    while count > 1 and shape[count - 1] == 1:
        count -= 1
    return count


def may_quantize(tensor: TensorInfo, architecture: str, *, leave_output: bool) -> bool:
    """Whether llama.cpp quantizes this tensor at all."""
    name = tensor.name
    if dimensions(tensor.shape) < 2 or not name.endswith("weight") or (leave_output and name == "output.weight"):
        return False
    if name in {"position_embd.weight", "token_types.weight"} or any(part in name for part in _KEPT_PARTS):
        return False
    return architecture != "glm5-next" or not any(part in name for part in _KEPT_GLM5_NEXT)


def _more(index: int, count: int) -> bool:
    """llama.cpp's use_more_bits: the first and last eighth, and every third in between."""
    eighth = count // 8
    return index < eighth or index >= 7 * count // 8 or (index >= eighth and (index - eighth) % 3 == 2)


@dataclass(slots=True)
class Chooser:
    """Walks the tensors in order and decides; holds the counters."""

    recipe: Recipe
    model: Model
    overrides: Overrides
    has_importance: bool
    tied: bool
    v_count: int
    _seen: dict[str, int] = field(default_factory=lambda: {"v": 0, "down": 0, "gate": 0, "up": 0})

    def decide(self, tensor: TensorInfo) -> Decision:
        """The next tensor's type."""
        if self.recipe.copies or not may_quantize(
            tensor, self.model.architecture, leave_output=self.overrides.leave_output
        ):
            return Decision(tensor, tensor.type, tensor.type, False)
        wanted, fits = self._wanted(tensor)
        chosen = wanted if not fits else self._fallback(tensor, wanted)
        low = chosen in NEEDS_IMPORTANCE or (chosen is T.Q2_K and self.recipe.name == "Q2_K_S")
        exempt = category(tensor.name) in {"output", "embedding"}
        by_pattern = any(re.search(regex, tensor.name) for regex, _ in self.overrides.patterns)
        return Decision(tensor, chosen, wanted, low and not exempt, by_pattern)

    def _wanted(self, tensor: TensorInfo) -> tuple[T, bool]:
        """The type by options and rules, and whether the shape fallback applies to it."""
        kind, options, base = category(tensor.name), self.overrides, self.recipe.base
        pattern = next((to for regex, to in options.patterns if re.search(regex, tensor.name)), None)
        named = tensor.name == "per_layer_token_embd.weight" and pattern is not None
        if options.embedding_type is not None and kind == "embedding" and not named:
            return options.embedding_type, False
        if options.output_type is not None and kind == "output":
            return options.output_type, False
        if base in _FLOATS:
            return base, False
        if pattern is not None:  # llama.cpp's counters stand still here, and later layers shift: so do ours
            return pattern, True
        return (base if options.pure else self._mixed(tensor, kind, base)), True

    def _fallback(self, tensor: TensorInfo, wanted: T) -> T:
        row = tensor.shape[0]
        if row % BLOCKS[wanted][0] == 0:
            return wanted
        smaller = _FALLBACKS.get(wanted, wanted)
        if smaller is wanted and BLOCKS[wanted][0] > 32:
            raise UsageError(
                f"{tensor.name}: rows of {row} do not divide into {wanted.name} blocks, and it has no fallback"
            )
        return smaller if row % BLOCKS[smaller][0] == 0 else T.F16

    def _mixed(self, tensor: TensorInfo, kind: str, base: T) -> T:
        """The recipe's own mix (llama_tensor_get_type_impl)."""
        name, recipe = tensor.name, self.recipe.name
        if self.model.architecture == "glm5-next" and any(p in name for p in ("attn_q_a", "attn_q_b", "nextn.eh_proj")):
            return T.Q8_0
        if kind == "output" or (kind == "embedding" and self.tied):
            return self._output(tensor, base)
        if recipe == "MXFP4_MOE":
            roles = self.model.architecture != "bailingmoe3" or kind in {"up", "gate", "down"}
            return T.MXFP4 if len(tensor.shape) > 2 and tensor.shape[2] > 1 and roles else T.Q8_0
        if kind == "embedding":
            return self._embedding(base)
        if recipe in _LOW_IQ:
            return self._low_iq(kind, base)
        if kind in _V_LIKE:
            return self._v_like(base)
        if kind == "k":
            return T.Q8_0 if self.model.experts == 8 else {"IQ3_XS": T.IQ3_XXS, "IQ3_XXS": T.IQ2_S}.get(recipe, base)
        if kind == "q":
            return {"IQ3_XS": T.IQ3_XXS, "IQ3_XXS": T.IQ2_S}.get(recipe, base)
        if kind == "down":
            return self._down(name, base)
        if kind == "attn_output":
            return self._attn_output(base)
        if kind in {"gate", "up"}:
            index, count = self._layer(kind, name)
            middle = count // 8 <= index < 7 * count // 8
            return T.IQ3_XXS if recipe == "IQ3_XS" and middle else base
        return base

    def _output(self, tensor: TensorInfo, base: T) -> T:
        recipe = self.recipe.name
        if self.overrides.output_type is not None:
            return self.overrides.output_type
        if recipe == "MXFP4_MOE" or self.model.architecture == "falcon" or tensor.shape[0] % BLOCKS[base][0]:
            return T.Q8_0
        if recipe in _LOW_IQ | {"IQ3_XXS"}:
            return T.Q5_K
        return base if base is T.Q8_0 else T.Q6_K

    def _embedding(self, base: T) -> T:
        recipe = self.recipe.name
        if recipe in {"IQ2_XXS", "IQ2_XS", "IQ1_S", "IQ1_M"}:
            return T.Q2_K
        if recipe in {"IQ2_S", "IQ2_M", "IQ3_XXS"}:
            return T.IQ3_S
        return T.Q4_K if recipe in {"TQ1_0", "TQ2_0", "Q2_0"} else base

    def _low_iq(self, kind: str, base: T) -> T:
        larger = self.recipe.name in {"IQ2_S", "IQ2_M"}
        if kind in _V_LIKE:
            self._seen["v"] += 1
            return T.Q4_K if self.model.gqa >= 4 or self.model.experts >= 4 else (T.IQ3_S if larger else T.Q2_K)
        if kind == "k" and self.model.experts == 8:
            return T.Q4_K
        if kind == "down":
            self._seen["down"] += 1
            early = self._seen["down"] - 1 < self.model.layers // 8
            return (T.IQ3_S if larger else T.Q2_K) if early else base
        if kind == "attn_output":
            if self.model.experts == 8:
                return T.Q5_K
            return T.IQ3_S if larger else (T.IQ2_XXS if self.recipe.name in {"IQ1_S", "IQ1_M"} else base)
        return base

    def _v_like(self, base: T) -> T:
        recipe, gqa, index = self.recipe.name, self.model.gqa, self._seen["v"]
        self._seen["v"] += 1
        chosen = base
        if recipe == "Q2_K":
            chosen = T.Q4_K if gqa >= 4 else T.Q3_K
        elif recipe == "IQ3_XXS":
            chosen = T.Q4_K if gqa >= 4 else (T.IQ3_XXS if self.has_importance else T.IQ3_S)
        elif (recipe in {"Q2_K_S", "IQ3_XS", "IQ3_S"} and gqa >= 4) or recipe == "IQ3_M":
            chosen = T.Q4_K
        elif recipe == "Q3_K_M":
            chosen = T.Q5_K if index < 2 else T.Q4_K
        elif recipe == "Q3_K_L" or (recipe in {"IQ4_NL", "IQ4_XS"} and gqa >= 4):
            chosen = T.Q5_K
        elif recipe in {"Q4_K_M", "Q5_K_M"} and _more(index, self.v_count):
            chosen = T.Q6_K
        elif recipe == "Q4_K_S" and index < 4:
            chosen = T.Q5_K
        if self.model.is_70b and chosen in {T.Q3_K, T.Q4_K}:
            chosen = T.Q5_K
        return T.Q8_0 if self.model.experts == 8 else chosen

    def _down(self, name: str, base: T) -> T:
        recipe, falcon = self.recipe.name, self.model.architecture == "falcon"
        index, count = self._layer("down", name)
        early, more = index < count // 8, _more(index, count)
        if recipe == "Q3_K_M":
            later = T.Q4_K if not falcon or more else T.Q3_K
            return T.Q5_K if index < count // 16 else later
        if recipe == "Q4_K_M" and falcon:
            return T.Q6_K if index < count // 16 else (T.Q5_K if more else T.Q4_K)
        rules = (
            (recipe == "Q2_K", T.Q3_K),
            (recipe == "Q2_K_S" and early, T.Q4_K),
            (recipe == "IQ3_XXS" and not self.has_importance, T.Q4_K if early else T.Q3_K),
            (recipe == "IQ3_M" and (early or (self.model.experts == 8 and more)), T.Q4_K),
            (recipe == "Q3_K_L", T.Q4_K if falcon else T.Q5_K),
            (recipe in {"Q4_K_M", "Q5_K_M"} and more, T.Q6_K),
            (recipe in {"IQ4_NL", "IQ4_XS"} and early and not self.has_importance, T.Q5_K),
            (recipe == "Q4_K_S" and early and not falcon, T.Q5_K),
            (recipe == "Q4_0" and early and self.has_importance, T.Q4_1),
            (recipe == "Q5_0" and early and self.has_importance, T.Q5_1),
        )
        return next((chosen for applies, chosen in rules if applies), base)

    def _attn_output(self, base: T) -> T:
        recipe = self.recipe.name
        if self.model.architecture == "falcon":
            return T.Q4_K if recipe == "Q3_K_L" else base
        if self.model.experts == 8:
            raised = {
                "Q2_K",
                "IQ3_XS",
                "IQ3_XXS",
                "Q3_K_S",
                "Q3_K_M",
                "IQ4_NL",
                "Q4_K_S",
                "Q4_K_M",
                "IQ3_S",
                "IQ3_M",
                "IQ4_XS",
            }
            return T.Q5_K if recipe in raised else base
        raised_to = {"Q2_K": T.Q3_K, "IQ3_XXS": T.IQ3_S, "Q3_K_M": T.Q4_K, "Q3_K_L": T.Q5_K, "IQ3_M": T.Q4_K}
        return raised_to.get(recipe, base)

    def _layer(self, kind: str, name: str) -> tuple[int, int]:
        """Layer index and count; the index is a counter, but with experts it is read from the name."""
        index, count = self._seen[kind], self.model.layers
        self._seen[kind] += 1
        if self.model.experts > 1:
            match = _LAYER.match(name)
            if not match or int(match[1]) >= count:
                raise InvalidFileError(f"{name}: no layer below {count} in the name of an expert model's tensor")
            index = int(match[1])
        return index, count


def choose(
    tensors: Iterable[TensorInfo], recipe: Recipe, model: Model, overrides: Overrides, *, has_importance: bool = False
) -> list[Decision]:
    """Decide for all tensors, which must be in output order. Raises UsageError, InvalidFileError."""
    listed = list(tensors)
    for regex, _ in overrides.patterns:
        try:
            re.compile(regex)
        except re.error as error:
            raise UsageError(f"--tensor-type: {regex!r} is no regular expression: {error}") from error
    names = [tensor.name for tensor in listed]
    chooser = Chooser(
        recipe,
        model,
        overrides,
        has_importance,
        tied="output.weight" not in names,
        v_count=sum(category(name) in _V_LIKE for name in names),
    )
    return [chooser.decide(tensor) for tensor in listed]
