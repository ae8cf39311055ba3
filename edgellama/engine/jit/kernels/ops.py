"""The operations of a program. Each has the signature (operation, step, thread, threads), see `layout.py`.

Rows are shared out among the threads: small work by thread number, large work by a counter that every thread advances.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from edgellama.engine.jit.kernels import layout as at
from edgellama.engine.jit.kernels.attention import attention, store
from edgellama.engine.jit.kernels.compiled import helper
from edgellama.engine.jit.kernels.gemm import LEAST_COLUMNS
from edgellama.engine.jit.kernels.memory import atomic_add, call9, doubles, floats, ints, longs
from edgellama.engine.jit.kernels.vectors import gelu_gate, quantize_row, silu_gate


@helper
def _count(step: Any, kind: Any, used: Any) -> Any:
    """Rows of an operation: tokens or wanted rows, times the experts per token."""
    rows = longs(step)[at.TOKENS] if kind % 2 == 0 else longs(step)[at.WANTED]
    return rows * used if kind >= 2 else rows


def norm(op: int, step: int, thread: int, threads: int) -> None:
    """x / rms(x) * weight for each part of each row, then quantized if asked for."""
    a = longs(op)
    n, heads, weight = a[at.A2], a[at.A3], floats(a[at.A4])
    epsilon = doubles(op)[at.A5]
    for row in range(thread, _count(step, a[at.A10], a[at.A11]), threads):
        for head in range(heads):
            x = floats(a[at.A0] + row * a[at.A1] + 4 * n * head)
            y = floats(a[at.A6] + row * a[at.A7] + 4 * n * head)
            total, second, third, fourth = 0.0, 0.0, 0.0, 0.0  # four chains, so that sums need not wait for each other
            for i in range(0, n // 4 * 4, 4):
                total += np.float64(x[i]) * np.float64(x[i])
                second += np.float64(x[i + 1]) * np.float64(x[i + 1])
                third += np.float64(x[i + 2]) * np.float64(x[i + 2])
                fourth += np.float64(x[i + 3]) * np.float64(x[i + 3])
            for i in range(n // 4 * 4, n):
                total += np.float64(x[i]) * np.float64(x[i])
            total += second + third + fourth
            scale = np.float32(1.0 / math.sqrt(total / n + epsilon))
            for i in range(n):
                y[i] = x[i] * scale * weight[i]
        if a[at.A8] != 0:
            quantize_row(a[at.A6] + row * a[at.A7], a[at.A8] + row * a[at.A9], n * heads // 32)


def quantize(op: int, step: int, thread: int, threads: int) -> None:
    """Rows of floats to rows of bytes, scales and sums."""
    a = longs(op)
    for row in range(thread, _count(step, a[at.A5], a[at.A6]), threads):
        quantize_row(a[at.A0] + row * a[at.A1], a[at.A2] + row * a[at.A3], a[at.A4] // 32)


def linear(op: int, step: int, thread: int, threads: int) -> None:
    """y = x times the transposed matrix + bias + residual, in chunks of rows of the matrix."""
    a = longs(op)
    rows, chunk, columns = a[at.A1], a[at.A2], _count(step, a[at.A12], a[at.A13])
    y, stride = a[at.A7], a[at.A8]
    if y == 0:
        y = longs(step)[at.LOGITS]
    if columns == 0 or y == 0:
        return
    many = a[at.A14] != 0 and columns >= LEAST_COLUMNS and thread < a[at.A19]
    if a[at.A14] != 0 and columns >= LEAST_COLUMNS:
        chunk = a[at.A22]
    while True:
        first = atomic_add(op + 8 * at.COUNTER, 1) * chunk
        if first >= rows:
            return
        size = min(chunk, rows - first)
        place = y + 4 * first
        done = size // 4 * 4 if many else 0
        w, row = a[at.A0] + first * a[at.A4], a[at.A4]
        if done > 0:
            scratch = a[at.A17] + thread * a[at.A18]
            call9(a[at.A15], a[at.A20], w, row, done, a[at.A9], scratch + 256, a[at.A21], 0, 0)
            call9(a[at.A14], scratch + 256, a[at.A21], done // 4, a[at.A16], columns, a[at.A23], place, stride, scratch)
        if done < size:
            out = place + 4 * done
            call9(a[at.A3], w + done * row, row, size - done, a[at.A5], a[at.A6], columns, a[at.A9], out, stride)
        if a[at.A10] != 0:
            bias = floats(a[at.A10] + 4 * first)
            for column in range(columns):
                out = floats(place + column * stride)
                for i in range(size):
                    out[i] += bias[i]
        if a[at.A11] != 0:
            for column in range(columns):
                out = floats(place + column * stride)
                residual = floats(a[at.A11] + column * stride + 4 * first)
                for i in range(size):
                    out[i] += residual[i]


def panels(op: int, step: int, thread: int, threads: int) -> None:
    """Columns in lanes for `gemm.py`, from quantized or float rows; nothing when there are few."""
    a = longs(op)
    columns, k = _count(step, a[at.A4], a[at.A5]), a[at.A2]
    if columns < LEAST_COLUMNS:
        return
    for panel in range(thread, (columns + 15) // 16, threads):
        out = a[at.A3] + panel * (64 * k if a[at.A6] != 0 else 24 * k)
        for column in range(16):
            there = 16 * panel + column < columns
            source = ints(a[at.A0] + (16 * panel + column if there else 0) * a[at.A1])
            words = k if a[at.A6] != 0 else (k + k // 2) // 4  # every field of a row is words, 16 side by side
            target = ints(out + 4 * column)
            for i in range(words):
                target[16 * i] = source[i] if there else 0


def gate(op: int, step: int, thread: int, threads: int) -> None:
    """activation(gate) * up, then quantized if asked for."""
    a = longs(op)
    for row in range(thread, _count(step, a[at.A9], a[at.A10]), threads):
        x, up, out = a[at.A0] + row * a[at.A1], a[at.A2] + row * a[at.A3], a[at.A4] + row * a[at.A5]
        if a[at.A11] == 0:
            silu_gate(x, up, out, a[at.A6])
        else:
            gelu_gate(x, up, out, a[at.A6])
        if a[at.A7] != 0:
            quantize_row(out, a[at.A7] + row * a[at.A8], a[at.A6] // 32)


def elementwise(op: int, step: int, thread: int, threads: int) -> None:
    """x * factor, x + y, cap * tanh(x / cap), or x * sigmoid(first of y)."""
    a = longs(op)
    kind, n, factor = a[at.A0], a[at.A7], np.float32(doubles(op)[at.A8])
    for row in range(thread, _count(step, a[at.A9], a[at.A10]), threads):
        first = a[at.A1] if a[at.A1] != 0 else longs(step)[at.LOGITS]
        target = a[at.A5] if a[at.A5] != 0 else longs(step)[at.LOGITS]
        if first == 0:
            return
        x, y = floats(first + row * a[at.A2]), floats(a[at.A3] + row * a[at.A4])
        out = floats(target + row * a[at.A6])
        if kind == at.SCALE:
            for i in range(n):
                out[i] = x[i] * factor
        elif kind == at.ADD:
            for i in range(n):
                out[i] = x[i] + y[i]
        elif kind == at.SOFTCAP:
            for i in range(n):
                out[i] = factor * np.float32(math.tanh(x[i] / factor))
        else:
            share = np.float32(1.0 / (1.0 + math.exp(-np.float64(y[0]))))
            for i in range(n):
                out[i] = x[i] * share


def wanted(op: int, step: int, thread: int, threads: int) -> None:
    """Copy the rows whose result is asked for to the front of another buffer."""
    a, s = longs(op), longs(step)
    for row in range(thread, s[at.WANTED], threads):
        x, out = floats(a[at.A0] + ints(s[at.WANTED_ROWS])[row] * a[at.A1]), floats(a[at.A2] + row * a[at.A3])
        for i in range(a[at.A4]):
            out[i] = x[i]


def route(op: int, step: int, thread: int, threads: int) -> None:
    """Probabilities of the experts, then the numbers and weights of the likeliest, per token."""
    a = longs(op)
    experts, used = a[at.A2], a[at.A3]
    for row in range(thread, _count(step, a[at.A7], 1), threads):
        x = floats(a[at.A0] + row * a[at.A1])
        chosen, weights = ints(a[at.A4] + 4 * used * row), floats(a[at.A5] + 4 * used * row)
        highest = x[0]
        for i in range(1, experts):
            highest = max(highest, x[i])
        total = 0.0
        for i in range(experts):
            total += math.exp(np.float64(x[i]) - highest)
        share = 0.0
        for slot in range(used):
            best = -1
            for i in range(experts):
                taken = False
                for earlier in range(slot):
                    taken = taken or chosen[earlier] == i
                if not taken and (best < 0 or x[i] > x[best]):
                    best = i
            chosen[slot] = best
            weight = math.exp(np.float64(x[best]) - highest) / total
            weights[slot] = np.float32(weight)
            share += weight
        if a[at.A6] != 0:
            for slot in range(used):
                weights[slot] = np.float32(weights[slot] / max(share, 2.0**-14))


def expert_linear(op: int, step: int, thread: int, threads: int) -> None:
    """Products of each (token, chosen expert) with that expert's matrix."""
    a = longs(op)
    rows, chunk, used = a[at.A1], a[at.A2], a[at.A10]
    pairs = _count(step, a[at.A12], 1) * used
    chunks = (rows + chunk - 1) // chunk
    while True:
        item = atomic_add(op + 8 * at.COUNTER, 1)
        if item >= pairs * chunks:
            return
        pair, first = item // chunks, item % chunks * chunk
        size = min(chunk, rows - first)
        weights = a[at.A0] + ints(a[at.A9])[pair] * a[at.A11] + first * a[at.A4]
        source = pair if a[at.A13] != 0 else pair // used
        x, y = a[at.A5] + source * a[at.A6], a[at.A7] + pair * a[at.A8] + 4 * first
        call9(a[at.A3], weights, a[at.A4], size, x, a[at.A6], 1, a[at.A14], y, a[at.A8])


def combine(op: int, step: int, thread: int, threads: int) -> None:
    """Weighted sum of each token's experts."""
    a = longs(op)
    used, n = a[at.A5], a[at.A6]
    for row in range(thread, _count(step, a[at.A7], 1), threads):
        out, weights = floats(a[at.A3] + row * a[at.A4]), floats(a[at.A2] + 4 * used * row)
        for i in range(n):
            out[i] = np.float32(0)
        for slot in range(used):
            x = floats(a[at.A0] + (row * used + slot) * a[at.A1])
            for i in range(n):
                out[i] += weights[slot] * x[i]


OPERATIONS = (
    norm,
    quantize,
    linear,
    panels,
    store,
    attention,
    gate,
    elementwise,
    wanted,
    route,
    expert_linear,
    combine,
)
