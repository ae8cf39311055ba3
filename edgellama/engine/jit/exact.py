"""The exact mode: every operation by its definition in float64, on weights dequantized to float32.

It is the numeric reference of the house and makes no attempt at speed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edgellama.engine.jit.cells import Cells, Step
from edgellama.engine.jit.model import Layer, Model
from edgellama.engine.jit.storage import Storage
from edgellama.engine.jit.weights import Weight
from edgellama.rope import rotate

Floats = NDArray[np.float64]


def softmax(x: Floats) -> Floats:
    """Along the last axis; rows of -inf only are not allowed."""
    raised = np.exp(x - x.max(-1, keepdims=True))
    result: Floats = raised / raised.sum(-1, keepdims=True)
    return result


def activate(x: Floats, activation: str) -> Floats:
    """SiLU, or GELU in its tanh approximation."""
    if activation == "silu":
        silu: Floats = x / (1 + np.exp(-x))
        return silu
    inner = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    result: Floats = 0.5 * x * (1 + np.tanh(inner))
    return result


class ExactOps:
    """`Ops` on float64 arrays, computed at once. `tick` is called often, and may raise to stop."""

    def __init__(self, model: Model, cells: Cells, storage: Storage, step: Step, tick: Callable[[], None]) -> None:
        self._cells, self._storage, self._step, self._tick = cells, storage, step, tick
        self._ropes = model.ropes
        self._turns = [rope.cos_sin(step.positions) for rope in model.ropes]

    def embed(self, table: Weight) -> Floats:
        return table.floats(self._step.tokens).astype(np.float64)

    def scale(self, x: Floats, factor: float) -> Floats:
        return x * factor

    def add(self, x: Floats, y: Floats) -> Floats:
        return x + y

    def norm(self, x: Floats, weight: Weight, epsilon: float, heads: int = 1) -> Floats:
        parts = x.reshape(len(x), heads, x.shape[1] // heads)
        mean = np.mean(parts * parts, axis=-1, keepdims=True)
        normed: Floats = parts / np.sqrt(mean + epsilon) * weight.vector().astype(np.float64)
        return normed.reshape(x.shape)

    def linear(self, x: Floats, weight: Weight, bias: Weight | None = None) -> Floats:
        out = self._product(x, weight, 0)
        return out if bias is None else out + bias.vector().astype(np.float64)

    def logits(self, x: Floats, weight: Weight, bias: Weight | None) -> Floats:
        return self.linear(x, weight, bias)

    def _product(self, x: Floats, weight: Weight, matrix: int) -> Floats:
        out = np.empty((len(x), weight.rows))
        for start, stop, values in weight.slabs(matrix):
            self._tick()
            np.matmul(x, values.astype(np.float64).T, out=out[:, start:stop])
        return out

    def part(self, x: Floats, start: int, width: int) -> Floats:
        return x[:, start : start + width]

    def rope(self, x: Floats, heads: int, rope: int) -> Floats:
        turned = x.reshape(len(x), heads, -1).copy()
        rotate(turned, *self._turns[rope], self._ropes[rope].layout)
        return turned.reshape(x.shape)

    def attention(self, q: Floats, k: Floats, v: Floats, layer: Layer, scale: float, softcap: float) -> Floats:
        step, n = self._step, len(q)
        self._storage.store(layer.index, step.cells, k.reshape(n, layer.heads_kv, -1), v.reshape(n, layer.heads_kv, -1))
        queries = q.reshape(n, layer.heads_kv, layer.heads // layer.heads_kv, -1) * scale
        out = np.empty((n, layer.heads_kv, layer.heads // layer.heads_kv, v.shape[1] // layer.heads_kv))
        for sequence in np.unique(step.sequences).tolist():
            rows = np.flatnonzero(step.sequences == sequence)
            positions = self._cells.held(sequence)
            cells = self._cells.table[sequence, positions]
            keys, values = self._storage.keys(layer.index, cells), self._storage.values(layer.index, cells)
            for part in np.array_split(rows, max(1, len(rows) * len(cells) * layer.heads >> 22)):
                self._tick()
                scores = np.einsum("tgrd,gnd->tgrn", queries[part], keys, optimize=True)
                if softcap:
                    scores = softcap * np.tanh(scores / softcap)
                distance = step.positions[part][:, None] - positions[None, :]
                hidden = distance < 0
                if layer.window:
                    hidden |= distance >= layer.window
                scores = np.where(hidden[:, None, None, :], -np.inf, scores)
                out[part] = np.einsum("tgrn,gnd->tgrd", softmax(scores), values, optimize=True)
        return out.reshape(n, -1)

    def gate(self, gate: Floats, up: Floats, activation: str) -> Floats:
        return activate(gate, activation) * up

    def experts(self, x: Floats, layer: Layer, used: int, normalized: bool, activation: str) -> Floats:
        probabilities = softmax(self.linear(x, layer["ffn_gate_inp.weight"]))
        chosen = np.argsort(-probabilities, axis=-1, kind="stable")[:, :used]
        weights = np.take_along_axis(probabilities, chosen, -1)
        if normalized:
            weights = weights / np.maximum(weights.sum(-1, keepdims=True), 2.0**-14)
        out = np.zeros_like(x)
        for expert in np.unique(chosen).tolist():
            rows, place = np.nonzero(chosen == expert)
            up = self._product(x[rows], layer["ffn_up_exps.weight"], expert)
            gate = self._product(x[rows], layer["ffn_gate_exps.weight"], expert)
            down = self._product(self.gate(gate, up, activation), layer["ffn_down_exps.weight"], expert)
            out[rows] += down * weights[rows, place][:, None]
        return out

    def sigmoid_scale(self, x: Floats, gate: Floats) -> Floats:
        scaled: Floats = x / (1 + np.exp(-gate))
        return scaled

    def wanted(self, x: Floats) -> Floats:
        return x[self._step.wanted]

    def softcap(self, x: Floats, cap: float) -> Floats:
        capped: Floats = cap * np.tanh(x / cap)
        return capped

    def release(self, keep: Floats) -> None:
        """Python frees what nobody holds."""
