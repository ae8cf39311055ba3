"""Keys and values into the cache, and attention over it; operations as in `ops.py`."""

from __future__ import annotations

import math

import numpy as np

from edgellama.engine.jit.kernels import layout as at
from edgellama.engine.jit.kernels.compiled import helper
from edgellama.engine.jit.kernels.memory import atomic_add, doubles, floats, ints, longs
from edgellama.engine.jit.kernels.vectors import (
    add_four_bf16,
    add_four_f16,
    add_four_f32,
    add_scaled_bf16,
    add_scaled_f16,
    add_scaled_f32,
    dot_bf16,
    dot_f16,
    dot_f32,
    dot_four_bf16,
    dot_four_f16,
    dot_four_f32,
    exp_block,
    half_bits,
    single_bits,
)

_BLOCK = 64
"""Positions whose scores are computed before the softmax is updated."""


@helper
def _turn(x: int, half: int, layout: int, cos: int, sin: int) -> None:
    v, c, s = floats(x), floats(cos), floats(sin)
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if layout == 0 else (i, i + half)
        p, q = v[first], v[second]
        v[first] = p * c[i] - q * s[i]
        v[second] = p * s[i] + q * c[i]


@helper
def _write(x: int, target: int, n: int, kind: int) -> None:
    """n floats into a cell of the cache."""
    v = floats(x)
    if kind == at.F32:
        out = floats(target)
        for i in range(n):
            out[i] = v[i]
    elif kind == at.F16:
        for i in range(n):
            at.shorts(target)[i] = half_bits(v[i])
    elif kind == at.BF16:
        for i in range(n):
            bits = np.uint32(single_bits(v[i]))
            at.shorts(target)[i] = np.int16(
                np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            )
    else:
        for block in range(n // 32):
            highest = np.float32(0)
            for i in range(32):
                highest = max(highest, abs(v[32 * block + i]))
            scale = highest / np.float32(127)
            inverse = np.float32(1) / scale if scale != 0 else np.float32(0)
            at.shorts(target + 34 * block)[0] = half_bits(scale)
            for i in range(32):
                scaled = v[32 * block + i] * inverse
                at.signed(target + 34 * block + 2)[i] = np.int8(scaled + math.copysign(np.float32(0.5), scaled))


def store(op: int, step: int, thread: int, threads: int) -> None:
    """Turn queries and keys by the tokens' positions, scale the queries, and write keys and values into their cells."""
    a, s = longs(op), longs(step)
    heads, heads_kv, n, half = a[at.A6], a[at.A7], a[at.A8], a[at.A9]
    scale = np.float32(doubles(op)[at.A12])
    for t in range(thread, s[at.TOKENS], threads):
        cell = ints(s[at.CELLS])[t]
        turns = longs(step + 8 * (at.TURNS + 2 * max(0, a[at.A11])))
        cos, sin = turns[0] + 4 * half * t, turns[1] + 4 * half * t
        for head in range(heads):
            q = a[at.A0] + t * a[at.A1] + 4 * n * head
            if a[at.A11] >= 0:
                _turn(q, half, a[at.A10], cos, sin)
            values = floats(q)
            for i in range(n):
                values[i] *= scale
        for head in range(heads_kv):
            k = a[at.A2] + t * a[at.A3] + 4 * n * head
            if a[at.A11] >= 0:
                _turn(k, half, a[at.A10], cos, sin)
            place = head * s[at.CELL_COUNT] + cell
            _write(k, a[at.A13] + place * a[at.A15], n, a[at.A17])
            _write(a[at.A4] + t * a[at.A5] + 4 * n * head, a[at.A14] + place * a[at.A16], n, a[at.A18])


@helper
def _score(q: int, key: int, n: int, kind: int, out: int) -> None:
    if kind == at.F16:
        dot_f16(key, q, 0, n, out, 0)
    elif kind == at.F32:
        dot_f32(key, q, 0, n, out, 0)
    elif kind == at.BF16:
        dot_bf16(key, q, 0, n, out, 0)
    else:
        total = np.float32(0)
        for block in range(n // 32):
            dot = np.float32(0)
            for i in range(32):
                dot += floats(q)[32 * block + i] * np.float32(at.signed(key + 34 * block + 2)[i])
            total += dot * at.half_at(key + 34 * block)
        floats(out)[0] = total


@helper
def _gather(value: int, weight: float, n: int, kind: int, out: int) -> None:
    if kind == at.F16:
        add_scaled_f16(value, weight, n, out)
    elif kind == at.F32:
        add_scaled_f32(value, weight, n, out)
    elif kind == at.BF16:
        add_scaled_bf16(value, weight, n, out)
    else:
        target = floats(out)
        for block in range(n // 32):
            scale = weight * at.half_at(value + 34 * block)
            for i in range(32):
                target[32 * block + i] += scale * np.float32(at.signed(value + 34 * block + 2)[i])


@helper
def _score_all(q: int, keys: int, size: int, chosen: int, count: int, n: int, kind: int, out: int) -> None:
    """Products of q with the keys in the chosen cells."""
    cells, fours = ints(chosen), 0 if kind == at.Q8_0 else count // 4 * 4
    for j in range(0, fours, 4):
        w, x = keys + cells[j] * size, keys + cells[j + 1] * size
        y, z = keys + cells[j + 2] * size, keys + cells[j + 3] * size
        if kind == at.F16:
            dot_four_f16(w, x, y, z, q, n, out + 4 * j)
        elif kind == at.F32:
            dot_four_f32(w, x, y, z, q, n, out + 4 * j)
        else:
            dot_four_bf16(w, x, y, z, q, n, out + 4 * j)
    for j in range(fours, count):
        _score(q, keys + cells[j] * size, n, kind, out + 4 * j)


@helper
def _gather_all(values: int, size: int, chosen: int, count: int, n: int, kind: int, weights: int, out: int) -> None:
    """Add the values in the chosen cells, times their weights."""
    cells, fours = ints(chosen), 0 if kind == at.Q8_0 else count // 4 * 4
    for j in range(0, fours, 4):
        w, x = values + cells[j] * size, values + cells[j + 1] * size
        y, z = values + cells[j + 2] * size, values + cells[j + 3] * size
        if kind == at.F16:
            add_four_f16(w, x, y, z, weights + 4 * j, n, out)
        elif kind == at.F32:
            add_four_f32(w, x, y, z, weights + 4 * j, n, out)
        else:
            add_four_bf16(w, x, y, z, weights + 4 * j, n, out)
    for j in range(fours, count):
        _gather(values + cells[j] * size, floats(weights)[j], n, kind, out)


def attention(op: int, step: int, thread: int, threads: int) -> None:
    """Softmax over all positions that a token sees, by blocks, for each token and head."""
    a, s = longs(op), longs(step)
    heads, n = a[at.A4], a[at.A6]
    group = heads // a[at.A5]
    scores = a[at.A7] + thread * a[at.A8]
    chosen = ints(scores + 4 * _BLOCK)
    cap = np.float32(doubles(op)[at.A10])
    while True:
        item = atomic_add(op + 8 * at.COUNTER, 1)
        if item >= s[at.TOKENS] * heads:
            return
        t, head = item // heads, item % heads
        q, out = a[at.A0] + t * a[at.A1] + 4 * n * head, a[at.A2] + t * a[at.A3] + 4 * n * head
        position = ints(s[at.POSITIONS])[t]
        table = ints(s[at.TABLE] + 4 * ints(s[at.SEQUENCES])[t] * s[at.CONTEXT])
        first = max(0, position - a[at.A9] + 1) if a[at.A9] > 0 else 0
        base = (head // group) * s[at.CELL_COUNT]
        result, total, highest = floats(out), np.float32(0), np.float32(-np.inf)
        for i in range(n):
            result[i] = np.float32(0)
        for start in range(first, position + 1, _BLOCK):
            count = 0
            for j in range(start, min(start + _BLOCK, position + 1)):
                if table[j] >= 0:
                    chosen[count] = table[j]
                    count += 1
            if count == 0:
                continue
            keys, values = a[at.A11] + base * a[at.A13], a[at.A12] + base * a[at.A14]
            _score_all(q, keys, a[at.A13], scores + 4 * _BLOCK, count, n, a[at.A15], scores)
            w = floats(scores)
            if cap > 0:
                for j in range(count):
                    w[j] = cap * np.float32(math.tanh(w[j] / cap))
            top = highest
            for j in range(count):
                top = max(top, w[j])
                if w[j] != w[j]:
                    top = w[j]
                    break
            if not top <= highest:
                keep = np.float32(math.exp(highest - top))
                total *= keep
                for i in range(n):
                    result[i] *= keep
                highest = top
            for j in range(count, (count + 7) // 8 * 8):
                w[j] = np.float32(-np.inf)
            total += exp_block(scores, (count + 7) // 8, highest)
            _gather_all(values, a[at.A14], scores + 4 * _BLOCK, count, n, a[at.A16], scores, out)
        inverse = np.float32(1) / total
        for i in range(n):
            result[i] *= inverse
