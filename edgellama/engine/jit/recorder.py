"""Records the forward pass as a program: a table of operations with the addresses of their data.

A program is recorded once per engine and serves every batch: what changes from step to step (number of tokens, their
cells, where the logits go) lies in a small block that the operations read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgellama.engine.jit.kernels import attention, compiled, gemm, ops
from edgellama.engine.jit.kernels import layout as at
from edgellama.engine.jit.kernels.dots import activation_bytes
from edgellama.engine.jit.kernels.rows import FLOATS, KERNELS
from edgellama.engine.jit.model import Layer, Model
from edgellama.engine.jit.storage import Storage
from edgellama.engine.jit.weights import Weight
from edgellama.errors import UnsupportedError
from edgellama.gguf_io import GGMLType
from edgellama.gguf_io.types import BLOCKS

_KINDS = {"f32": at.F32, "f16": at.F16, "bf16": at.BF16, "q8_0": at.Q8_0}
_CHUNK_BYTES = 1 << 14
"""Weights a thread takes at a time: they stay in its first cache while all columns pass."""
_UNPACKED_BYTES = 1 << 17
"""Unpacked weights a thread takes at a time; they stay in its second cache while all panels pass."""
_SCRATCH_WORDS = 256
MOST_THREADS = 512


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory of one value: rows of `width` float32."""

    memory: NDArray[np.uint8]

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data)


@dataclass(slots=True, eq=False)
class Value:
    """A value of the program, or some columns of one."""

    address: int
    """0 stands for the caller's logits."""
    stride: int
    """Bytes from row to row."""
    width: int
    rows: int
    """0: one per token; 1: one per wanted row; 2 and 3: the same times the experts in use."""
    source: int = -1
    """The operation that made it."""
    quantized: Value | None = None
    panels: Buffer | None = field(default=None, repr=False)
    buffer: Buffer | None = field(default=None, repr=False)


def supported(weight: Weight) -> bool:
    """Whether a matrix can be multiplied as it lies in the file."""
    return weight.type in KERNELS


class Recorder:
    """`Ops` whose values are places in memory."""

    def __init__(self, model: Model, storage: Storage, most_rows: int, threads: int) -> None:
        self._model, self._storage, self._most_rows = model, storage, most_rows
        self._used = max(1, model.experts_used)
        self._chunks_wanted = 4 * threads
        self._scratch_threads = max(threads, os.cpu_count() or 1)
        self._scratch_bytes, self._with_scratch = 0, list[int]()
        self._program: list[NDArray[np.int64]] = []
        self._kept: list[object] = []
        self._free: dict[int, list[Buffer]] = {}
        self._busy: list[Buffer] = []
        self._unmet: set[int] = set()
        """Buffers written by operations whose threads have not met yet."""
        self._copies: dict[str, Weight] = {}
        self.input = self._new(model.embedding_length, 0)
        """Where the caller puts the tokens' embeddings."""

    def finish(self) -> NDArray[np.int64]:
        """The program, int64[operations, words]. Threads meet behind the last operation."""
        self._program[-1][at.BARRIER] = 1
        table = np.stack(self._program)
        stride = -(-self._scratch_bytes // 4096) * 4096
        scratch = self._constant(np.zeros(stride * self._scratch_threads, np.uint8))
        for index in self._with_scratch:
            table[index, at.A17], table[index, at.A18] = scratch, stride
        self._kept.append(table)
        return table

    @property
    def operations(self) -> int:
        """Operations recorded so far."""
        return len(self._program)

    # ---- memory

    def _allocate(self, nbytes: int) -> Buffer:
        free = self._free.get(nbytes)
        buffer = free.pop() if free else Buffer(np.zeros(nbytes + 64, np.uint8))
        self._busy.append(buffer)
        return buffer

    def _new(self, width: int, rows: int, row_bytes: int = 0) -> Value:
        stride = row_bytes or 4 * width
        count = self._most_rows * (self._used if rows >= 2 else 1)
        buffer = self._allocate(-(-stride * count // 4096) * 4096)
        return Value(buffer.address, stride, width, rows, len(self._program), buffer=buffer)

    def release(self, keep: Value) -> None:
        """See `Ops.release`: memory of everything but `keep` is used again."""
        for buffer in self._busy:
            if buffer is not keep.buffer and buffer is not self.input.buffer:
                self._free.setdefault(len(buffer.memory) - 64, []).append(buffer)
        kept = (keep.buffer, self.input.buffer)
        self._busy = [buffer for buffer in self._busy if buffer in kept]

    def _constant(self, array: NDArray[np.generic]) -> int:
        whole = np.ascontiguousarray(array)
        self._kept.append(whole)
        return int(whole.ctypes.data)

    # ---- operations

    def _record(self, function: Callable[..., None], *arguments: int | float, barrier: int = at.ALWAYS) -> None:
        words = np.zeros(at.OPERATION_WORDS, np.int64)
        words[at.FUNCTION] = compiled.operation(function)
        words[at.BARRIER] = barrier
        for place, argument in enumerate(arguments, at.A0):
            if isinstance(argument, float):
                words[place] = np.float64(argument).view(np.int64)
            else:
                words[place] = argument
        self._program.append(words)

    def embed(self, table: Weight) -> Value:  # noqa: ARG002 - the caller fills it in
        return self.input

    def _elementwise(self, kind: int, x: Value, y: Value | None, factor: float) -> Value:
        out = x if x.address == 0 else self._new(x.width, x.rows)
        other = (0, 0) if y is None else (y.address, y.stride)
        self._record(
            ops.elementwise, kind, x.address, x.stride, *other, out.address, out.stride, x.width, factor, x.rows,
            self._used,
        )  # fmt: skip
        return out

    def scale(self, x: Value, factor: float) -> Value:
        return self._elementwise(at.SCALE, x, None, float(factor))

    def softcap(self, x: Value, cap: float) -> Value:
        return self._elementwise(at.SOFTCAP, x, None, float(cap))

    def sigmoid_scale(self, x: Value, gate: Value) -> Value:
        return self._elementwise(at.SIGMOID, x, gate, 0.0)

    def add(self, x: Value, y: Value) -> Value:
        last = len(self._program) - 1
        words = self._program[-1]  # y came from an operation
        plain = y.source == last and words[at.FUNCTION] == compiled.operation(ops.linear) and words[at.A11] == 0
        if plain and x.stride == y.stride:
            words[at.A11] = x.address  # the product adds it while its rows are still in the cache
            return y
        return self._elementwise(at.ADD, x, y, 0.0)

    def norm(self, x: Value, weight: Weight, epsilon: float, heads: int = 1) -> Value:
        out = self._new(x.width, x.rows)
        vector = self._constant(weight.vector())
        self._record(
            ops.norm, x.address, x.stride, x.width // heads, heads, vector, float(epsilon), out.address, out.stride,
            0, 0, x.rows, self._used,
        )  # fmt: skip
        return out

    def _quantized(self, x: Value) -> Value:
        """Bytes of x, made by the operation that makes x where it can."""
        if x.quantized is not None:
            return x.quantized
        out = self._new(x.width, x.rows, activation_bytes(x.width))
        made_by = self._program[x.source][at.FUNCTION] if 0 <= x.source < len(self._program) else 0
        slots = {compiled.operation(ops.norm): at.A8, compiled.operation(ops.gate): at.A7}
        if made_by in slots:
            words = self._program[x.source]
            words[slots[made_by]], words[slots[made_by] + 1] = out.address, out.stride
        else:
            self._record(ops.quantize, x.address, x.stride, out.address, out.stride, x.width, x.rows, self._used)
        x.quantized = out
        return out

    def _matrix(self, weight: Weight) -> Weight:
        """The matrix itself, or a float16 copy of one whose type has no kernel."""
        if supported(weight):
            return weight
        copy = self._copies.get(weight.name)
        if copy is None:
            data = np.empty((weight.matrices, weight.rows, 2 * weight.columns), np.uint8)
            for matrix in range(weight.matrices):
                for start, stop, values in weight.slabs(matrix):
                    data[matrix, start:stop] = values.astype(np.float16).view(np.uint8)
            copy = self._copies[weight.name] = Weight(weight.name, GGMLType.F16, data, weight.columns)
        return copy

    def _operand(self, x: Value, weight: Weight) -> tuple[Value, int]:
        """x in the form the matrix's kernel takes, and the number of blocks (or values) per row."""
        if weight.columns % 8:
            raise UnsupportedError(
                f"the JIT engine needs rows of a multiple of 8 values, {weight.name} has {weight.columns}",
                "use the engine llamacpp",
            )
        if weight.type in FLOATS:
            return x, weight.columns
        return self._quantized(x), weight.columns // BLOCKS[weight.type][0]

    def _chunk(self, weight: Weight) -> int:
        by_cache: int = max(1, _CHUNK_BYTES // weight.data.shape[2])
        return max(1, min(by_cache, -(-weight.rows // self._chunks_wanted), 64))

    def linear(self, x: Value, weight: Weight, bias: Weight | None = None) -> Value:
        return self._linear(x, weight, bias, self._new(weight.rows, x.rows))

    def logits(self, x: Value, weight: Weight, bias: Weight | None) -> Value:
        """As `linear`, into the caller's memory."""
        return self._linear(x, weight, bias, Value(0, 4 * weight.rows, weight.rows, x.rows))

    def _linear(self, x: Value, weight: Weight, bias: Weight | None, out: Value) -> Value:
        weight = self._matrix(weight)
        fresh = x.quantized is None and weight.type not in FLOATS
        operand, blocks = self._operand(x, weight)
        linear = compiled.operation(ops.linear)
        previous = self._program[-1] if self._program else None
        alike = previous is not None and previous[at.FUNCTION] == linear and previous[at.A11] == 0
        if previous is not None and alike and not fresh and previous[at.A5] in (operand.address, x.address):
            previous[at.BARRIER] = 0  # products of the same vector need not wait for each other
        many = self._many(operand, weight)
        out.source = len(self._program)
        self._record(
            ops.linear,
            int(weight.data.ctypes.data),
            weight.rows,
            self._chunk(weight),
            compiled.rows(KERNELS[weight.type]),
            weight.data.shape[2],
            operand.address,
            operand.stride,
            out.address,
            out.stride,
            blocks,
            0 if bias is None else self._constant(bias.vector()),
            0,
            x.rows,
            self._used,
            *many,
        )
        self._kept.append(weight)
        return out

    def _many(self, operand: Value, weight: Weight) -> tuple[int, ...]:
        """What `ops.linear` needs for many columns; nothing where this host has no such kernel."""
        function = gemm.tiles(weight.type)
        if function is None or self._most_rows < gemm.LEAST_COLUMNS:
            return ()
        k, as_floats = weight.columns, weight.type in FLOATS
        if operand.panels is None:
            size = gemm.panel_bytes(k, as_floats) * -(-self._most_rows // gemm.COLUMNS)
            operand.panels = self._allocate(-(-size // 4096) * 4096)
            self._record(
                ops.panels, operand.address, operand.stride, k, operand.panels.address, operand.rows, self._used,
                int(as_floats), barrier=at.MANY,
            )  # fmt: skip
        row = gemm.unpacked_bytes(weight.type, k)
        chunk = max(4, min(32, _UNPACKED_BYTES // row // 4 * 4, -(-weight.rows // self._chunks_wanted) // 4 * 4))
        self._scratch_bytes = max(self._scratch_bytes, 256 + row * chunk)
        self._with_scratch.append(len(self._program))
        return (
            compiled.rows(function),
            compiled.rows(gemm.unpack_rows),
            operand.panels.address,
            0,
            0,
            self._scratch_threads,
            gemm.UNPACK[weight.type],
            row,
            chunk,
            k,
        )

    def part(self, x: Value, start: int, width: int) -> Value:
        return Value(x.address + 4 * start, x.stride, width, x.rows, buffer=x.buffer)

    def rope(self, x: Value, heads: int, rope: int) -> Value:  # noqa: ARG002 - done while keys and values are stored
        return x

    def attention(self, q: Value, k: Value, v: Value, layer: Layer, scale: float, softcap: float) -> Value:
        n, store = self._model.key_length, self._storage.layers[layer.index]
        if n % 8:
            raise UnsupportedError(
                f"the JIT engine needs heads of a multiple of 8 values, not {n}", "use the engine llamacpp"
            )
        rope = self._model.ropes[max(0, layer.rope)]
        memory = (
            int(store.keys.ctypes.data),
            int(store.values.ctypes.data),
            store.keys.shape[2],
            store.values.shape[2],
        )
        kinds = (_KINDS[self._storage.key_type], _KINDS[self._storage.value_type])
        self._record(
            attention.store, q.address, q.stride, k.address, k.stride, v.address, v.stride, layer.heads, layer.heads_kv,
            n, len(rope.frequencies), int(rope.layout == "half"), layer.rope, float(scale), *memory, *kinds,
        )  # fmt: skip
        out = self._new(layer.heads * n, q.rows)
        scratch = self._constant(np.zeros((MOST_THREADS, _SCRATCH_WORDS), np.float32))
        self._record(
            attention.attention, q.address, q.stride, out.address, out.stride, layer.heads, layer.heads_kv, n,
            scratch, 4 * _SCRATCH_WORDS, layer.window, float(softcap), *memory, *kinds,
        )  # fmt: skip
        out.source = len(self._program) - 1
        return out

    def gate(self, gate: Value, up: Value, activation: str) -> Value:
        out = self._new(gate.width, gate.rows)
        kind = int(activation == "gelu")
        self._record(
            ops.gate, gate.address, gate.stride, up.address, up.stride, out.address, out.stride, gate.width, 0, 0,
            gate.rows, self._used, kind,
        )  # fmt: skip
        return out

    def wanted(self, x: Value) -> Value:
        out = self._new(x.width, 1)
        self._record(ops.wanted, x.address, x.stride, out.address, out.stride, x.width)
        return out

    def experts(self, x: Value, layer: Layer, used: int, normalized: bool, activation: str) -> Value:
        router = layer["ffn_gate_inp.weight"]
        scores = self.linear(x, router)
        chosen, weights = self._new(used, x.rows), self._new(used, x.rows)
        self._record(
            ops.route, scores.address, scores.stride, router.rows, used, chosen.address, weights.address,
            int(normalized), x.rows,
        )  # fmt: skip
        up = self._expert_linear(x, layer["ffn_up_exps.weight"], chosen, x.rows)
        gate = self._expert_linear(x, layer["ffn_gate_exps.weight"], chosen, x.rows)
        down = self._expert_linear(
            self.gate(gate, up, activation), layer["ffn_down_exps.weight"], chosen, x.rows, own=True
        )
        out = self._new(x.width, x.rows)
        self._record(
            ops.combine, down.address, down.stride, weights.address, out.address, out.stride, used, x.width, x.rows
        )
        return out

    def _expert_linear(self, x: Value, weight: Weight, chosen: Value, rows: int, own: bool = False) -> Value:
        weight = self._matrix(weight)
        operand, blocks = self._operand(x, weight)
        out = self._new(weight.rows, rows + 2)
        self._record(
            ops.expert_linear,
            int(weight.data.ctypes.data),
            weight.rows,
            self._chunk(weight),
            compiled.rows(KERNELS[weight.type]),
            weight.data.shape[2],
            operand.address,
            operand.stride,
            out.address,
            out.stride,
            chosen.address,
            self._used,
            weight.rows * weight.data.shape[2],
            rows,
            int(own),
            blocks,
        )
        self._kept.append(weight)
        return out
