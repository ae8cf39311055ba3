"""One forward pass of every family, written once over operations that either compute at once or record a program.

The order of operations follows llama.cpp's graphs (`src/models/*.cpp`), so that results can be compared layer by layer.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from edgellama.engine.jit.model import Layer, Model
from edgellama.engine.jit.weights import Weight

Value = TypeVar("Value")


class Ops(Protocol[Value]):
    """Operations on rows of activations, one row per token: [tokens, width]."""

    def embed(self, table: Weight) -> Value:
        """Rows of the embedding table for the batch's tokens."""

    def scale(self, x: Value, factor: float) -> Value:
        """x * factor."""

    def add(self, x: Value, y: Value) -> Value:
        """x + y."""

    def norm(self, x: Value, weight: Weight, epsilon: float, heads: int = 1) -> Value:
        """Root-mean-square norm of each of `heads` equal parts of a row, times `weight`."""

    def linear(self, x: Value, weight: Weight, bias: Weight | None = None) -> Value:
        """x times the transposed matrix, plus `bias`."""

    def logits(self, x: Value, weight: Weight, bias: Weight | None) -> Value:
        """As `linear`, for the last product of a pass."""

    def part(self, x: Value, start: int, width: int) -> Value:
        """Columns [start, start + width)."""

    def rope(self, x: Value, heads: int, rope: int) -> Value:
        """Each head turned by the tokens' positions; may overwrite x."""

    def attention(self, q: Value, k: Value, v: Value, layer: Layer, scale: float, softcap: float) -> Value:
        """Store k and v in the cache's cells of the batch, then attend to all that each token sees."""

    def gate(self, gate: Value, up: Value, activation: str) -> Value:
        """activation(gate) * up."""

    def experts(self, x: Value, layer: Layer, used: int, normalized: bool, activation: str) -> Value:
        """The chosen experts' feed-forward, weighted."""

    def sigmoid_scale(self, x: Value, gate: Value) -> Value:
        """Rows of x times the sigmoid of the one column of `gate`."""

    def wanted(self, x: Value) -> Value:
        """Only the rows whose result is asked for."""

    def softcap(self, x: Value, cap: float) -> Value:
        """cap * tanh(x / cap)."""

    def release(self, keep: Value) -> None:
        """All values but `keep` are no longer needed."""


def forward(ops: Ops[Value], model: Model) -> Value:
    """The hidden state of the wanted rows behind the last norm: [wanted, embedding length]."""
    family, header = model.family, model.header
    x = ops.embed(model.tensors["token_embd.weight"])
    x = _scaled(ops, x, family.embedding_scale(header))
    for layer in model.layers:
        a = _attention(ops, x, model, layer)
        if layer is model.layers[-1]:
            a, x = ops.wanted(a), ops.wanted(x)
        a = _linear(ops, model, a, layer["attn_output.weight"], layer.get("attn_output.bias"))
        a = _normed(ops, a, model, layer, family.attention_post_norm)
        residual = family.residual_scale(header)
        x = ops.add(x, _scaled(ops, a, residual))
        f = _feed_forward(ops, _normed(ops, x, model, layer, family.feed_forward_norm), model, layer)
        f = _normed(ops, f, model, layer, family.feed_forward_post_norm)
        x = ops.add(x, _scaled(ops, f, residual))
        ops.release(x)
    return ops.norm(x, model.tensors["output_norm.weight"], model.epsilon)


def head(ops: Ops[Value], model: Model, hidden: Value) -> Value:
    """Logits of `hidden`: [wanted, vocabulary]."""
    logits = ops.logits(hidden, model.output, model.tensors.get("output.bias"))
    logits = _scaled(ops, logits, model.family.logit_scale(model.header))
    cap = model.family.final_softcap(model.header)
    return ops.softcap(logits, cap) if cap else logits


def _linear(ops: Ops[Value], model: Model, x: Value, weight: Weight, bias: Weight | None = None) -> Value:
    """x times a matrix, with its adapters."""
    y = ops.linear(x, weight, bias)
    for down, up in model.adapters.get(weight.name, ()):
        y = ops.add(y, ops.linear(ops.linear(x, down), up))
    return y


def _scaled(ops: Ops[Value], x: Value, factor: float) -> Value:
    return x if factor == 1.0 else ops.scale(x, factor)


def _normed(ops: Ops[Value], x: Value, model: Model, layer: Layer, name: str) -> Value:
    return ops.norm(x, layer[f"{name}.weight"], model.epsilon) if name else x


def _attention(ops: Ops[Value], x: Value, model: Model, layer: Layer) -> Value:
    family = model.family
    h = _normed(ops, x, model, layer, family.attention_norm)
    q_width, kv_width = layer.heads * model.key_length, layer.heads_kv * model.key_length
    fused = layer.get("attn_qkv.weight")
    if fused is not None:
        qkv = _linear(ops, model, h, fused, layer.get("attn_qkv.bias"))
        q = ops.part(qkv, 0, q_width)
        k, v = ops.part(qkv, q_width, kv_width), ops.part(qkv, q_width + kv_width, kv_width)
    else:
        q, k, v = (_linear(ops, model, h, layer[f"attn_{n}.weight"], layer.get(f"attn_{n}.bias")) for n in "qkv")
    if family.head_norms:
        q = _head_norm(ops, q, model, layer["attn_q_norm.weight"], q_width)
        k = _head_norm(ops, k, model, layer["attn_k_norm.weight"], kv_width)
    if layer.rope >= 0:
        q, k = ops.rope(q, layer.heads, layer.rope), ops.rope(k, layer.heads_kv, layer.rope)
    header = model.header
    return ops.attention(q, k, v, layer, family.attention_scale(header), family.attention_softcap(header))


def _head_norm(ops: Ops[Value], x: Value, model: Model, weight: Weight, width: int) -> Value:
    """Per head, or over the whole width when the weight is that long."""
    return ops.norm(x, weight, model.epsilon, width // weight.columns)


def _feed_forward(ops: Ops[Value], h: Value, model: Model, layer: Layer) -> Value:
    activation = model.family.activation
    if layer.get("ffn_gate_inp.weight") is None:
        return _gated(ops, model, h, layer, "", activation)
    out = ops.experts(h, layer, model.experts_used, model.family.normalized_experts, activation)
    if layer.get("ffn_up_shexp.weight") is not None:
        shared = _gated(ops, model, h, layer, "_shexp", activation)
        switch = layer.get("ffn_gate_inp_shexp.weight")
        if switch is not None:
            shared = ops.sigmoid_scale(shared, _linear(ops, model, h, switch))
        out = ops.add(out, shared)
    return out


def _gated(ops: Ops[Value], model: Model, h: Value, layer: Layer, suffix: str, activation: str) -> Value:
    up = _linear(ops, model, h, layer[f"ffn_up{suffix}.weight"], layer.get(f"ffn_up{suffix}.bias"))
    if layer.get(f"ffn_gate{suffix}.weight") is None:  # gate and up in one matrix, gate first
        width = layer[f"ffn_up{suffix}.weight"].rows // 2
        gate, up = ops.part(up, 0, width), ops.part(up, width, width)
    else:
        gate = _linear(ops, model, h, layer[f"ffn_gate{suffix}.weight"], layer.get(f"ffn_gate{suffix}.bias"))
    down = ops.gate(gate, up, activation)
    return _linear(ops, model, down, layer[f"ffn_down{suffix}.weight"], layer.get(f"ffn_down{suffix}.bias"))
