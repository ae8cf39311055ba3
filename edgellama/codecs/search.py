"""The searches of ggml's quantizers, run on many sub-blocks side by side, one per lane.

Every lane performs the scalar definition's float32 operations in the scalar order, so the chosen scale and levels are
the same bits. Source of the definitions: ggml-quants.c (make_qkx2_quants, make_qkx3_quants, make_qx_quants,
make_q3_quants) of the pinned llama.cpp.

All kernels take addresses (uint64) of C-contiguous float32 scratch: x and w are [n, lanes], levels is [n, lanes] and
receives the integers as floats, out is [2, lanes].
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from edgellama.codecs.compiling import intrinsic
from edgellama.codecs.lanes import Array, Float, Lanes

EPSILON = 1e-15
"""ggml's GROUP_MAX_EPS: a sub-block whose largest magnitude is smaller counts as zero."""


def _kernel(arguments: int, emit: Callable[..., None]) -> Any:
    """An intrinsic of `arguments` addresses whose body `emit(builder, *addresses)` writes."""

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        emit(builder, *args)
        return context.get_dummy_value()

    signature = types.void(*[types.uint64] * arguments)
    if arguments == 3:

        @intrinsic
        def three(_typing: Any, a: Any, b: Any, c: Any) -> Any:
            return signature, codegen

        return three

    @intrinsic
    def four(_typing: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        return signature, codegen

    return four


def weigh_by_size(v: Lanes, n: int, x: Array, w: Array) -> None:
    """w = |x|."""
    v.each(n, lambda i: w.put(i, x[i].abs()))


def weigh_by_spread(v: Lanes, n: int, x: Array, w: Array) -> None:
    """w = sqrt(mean square of the sub-block) + |x|."""
    (total,) = v.fold(n, [v.const(0)], lambda i, total: [total + x[i] * x[i]])
    usual = v.call("sqrt", total / v.const(n))
    v.each(n, lambda i: w.put(i, usual + x[i].abs()))


def weigh_by_square(v: Lanes, n: int, x: Array, w: Array) -> None:
    """w = x * x."""
    v.each(n, lambda i: w.put(i, x[i] * x[i]))


Weigh = Callable[[Lanes, int, Array, Array], None]


def affine(
    n: int,
    top: int,
    rmin: float,
    rdelta: float,
    steps: int,
    lanes: int,
    *,
    absolute: bool = False,
    weigh: Weigh | None = None,
) -> Any:
    """x ~ scale * level - minimum with levels 0..top: kernel(x, w, levels, out), out = [scale, minimum].

    `weigh` fills w first; without it the caller has.

    The range of each lane must be 0 or within 2**-100 .. 2**120, so that no level wraps; the caller sends other
    superblocks to the scalar definition.
    """

    def emit(builder: Any, x_at: Any, w_at: Any, levels_at: Any, out_at: Any) -> None:
        v = Lanes(builder, lanes)
        x, w, levels, out = (v.array(a) for a in (x_at, w_at, levels_at, out_at))
        zero, highest = v.const(0), v.const(top)
        if weigh is not None:
            weigh(v, n, x, w)

        def level(value: Float, iscale: Float, low: Float) -> Float:
            return (iscale * (value - low)).round_even().at_most(highest).at_least(zero)

        def error(scale: Float, low: Float, level_of: Callable[[Any], Float]) -> Float:
            def add(i: Any, total: Float) -> list[Float]:
                diff = scale * level_of(i) + low - x[i]
                return [total + w[i] * (diff.abs() if absolute else diff * diff)]

            return v.fold(n, [zero], add)[0]

        def survey(i: Any, low: Float, high: Float, sum_w: Float, sum_x: Float) -> list[Float]:
            value, weight = x[i], w[i]
            low = (value < low).pick(value, low)
            high = (value > high).pick(value, high)
            return [low, high, sum_w + weight, sum_x + weight * value]

        nothing = v.const(-0.0)  # -0 + v is v for every v, zeros and their signs included
        low, high, sum_w, sum_x = v.fold(n, [x[0], x[0], nothing, nothing], survey)
        low = (low > zero).pick(zero, low)
        flat = high.equals(low)
        iscale = highest / (high - low)
        scale = v.const(1) / iscale
        first_iscale, first_low = iscale, low
        state = [error(scale, low, lambda i: level(x[i], first_iscale, first_low)), scale, low, iscale, low]
        numerators = v.table(
            [float(np.float32(rmin) + np.float32(rdelta) * np.float32(k) + np.float32(top)) for k in range(steps + 1)]
        )
        trial = v.array(builder.ptrtoint(cgutils.alloca_once(builder, v.floats, size=n), ir.IntType(64)))
        with v.steps(steps + 1, state) as (index, old, new):
            best, scale, low, _, _ = old
            iscale = v.entry(numerators, index) / (high - low)
            sum_l, sum_l2, sum_xl = v.fold(
                n, [zero] * 3, partial(_trial_sums, x, w, trial, partial(level, iscale=iscale, low=low))
            )
            det = sum_w * sum_l2 - sum_l * sum_l
            new_scale = (sum_w * sum_xl - sum_x * sum_l) / det
            new_low = (sum_l2 * sum_x - sum_l * sum_xl) / det
            positive = new_low > zero
            new_scale = positive.pick(sum_xl / sum_l2, new_scale)
            new_low = positive.pick(zero, new_low)
            cost = error(new_scale, new_low, trial.__getitem__)
            better = (det > zero) & (cost < best)
            found = (cost, new_scale, new_low, iscale, low)
            new += [better.pick(a, b) for a, b in zip(found, old, strict=True)]
        _, scale, low, kept_iscale, kept_low = state
        v.each(n, lambda i: levels.put(i, flat.pick(zero, level(x[i], kept_iscale, kept_low))))
        out[0] = flat.pick(zero, scale)
        out[1] = -low

    return _kernel(4, emit)


def symmetric(n: int, half: int, lanes: int, *, weigh: Weigh | None = None) -> Any:
    """x ~ scale * (level - half) with levels 0..2*half-1: kernel(x, w, levels, out), out = [scale, unused].

    `weigh` fills w first; without it the caller has.
    """

    def emit(builder: Any, x_at: Any, w_at: Any, levels_at: Any, out_at: Any) -> None:
        v = Lanes(builder, lanes)
        x, w, levels, out = (v.array(a) for a in (x_at, w_at, levels_at, out_at))
        zero, bottom, top = v.const(0), v.const(-half), v.const(half - 1)
        if weigh is not None:
            weigh(v, n, x, w)

        def level(value: Float, iscale: Float) -> Float:
            return (iscale * value).round_even().at_most(top).at_least(bottom)

        def sums(iscale: Float) -> list[Float]:
            def add(i: Any, sum_lx: Float, sum_l2: Float) -> list[Float]:
                q, weight = level(x[i], iscale), w[i]
                return [sum_lx + weight * x[i] * q, sum_l2 + weight * q * q]

            return v.fold(n, [zero, zero], add)

        extreme, magnitude = _extreme(v, x, n)
        dead = magnitude < v.const(EPSILON)
        iscale = bottom / extreme
        sum_lx, sum_l2 = sums(iscale)
        scale = sum_l2.differs(zero).pick(sum_lx / sum_l2, zero)
        state = [scale * sum_lx, scale, iscale]
        offsets = [np.float32(0.1) * np.float32(k) for k in range(-9, 10) if k]
        numerators = v.table([float(-(np.float32(half) + offset)) for offset in offsets])
        with v.steps(len(offsets), state) as (index, old, new):
            best = old[0]
            iscale = v.entry(numerators, index) / extreme
            sum_lx, sum_l2 = sums(iscale)
            better = (sum_l2 > zero) & (sum_lx * sum_lx > best * sum_l2)
            scale = sum_lx / sum_l2
            new += [better.pick(a, b) for a, b in zip((scale * sum_lx, scale, iscale), old, strict=True)]
        _, scale, iscale = state
        kept = iscale
        v.each(n, lambda i: levels.put(i, dead.pick(zero, level(x[i], kept) + v.const(half))))
        out[0] = dead.pick(zero, scale)

    return _kernel(4, emit)


def refined(n: int, half: int, lanes: int) -> Any:
    """`symmetric` with w = x*x and up to five sweeps of single-level changes (Q3_K): kernel(x, levels, out)."""

    def emit(builder: Any, x_at: Any, levels_at: Any, out_at: Any) -> None:
        v = Lanes(builder, lanes)
        x, levels, out = (v.array(a) for a in (x_at, levels_at, out_at))
        zero, bottom, top = v.const(0), v.const(-half), v.const(half - 1)
        extreme, magnitude = _extreme(v, x, n)
        dead = magnitude < v.const(EPSILON)
        iscale = bottom / extreme

        def start(i: Any, sum_lx: Float, sum_l2: Float) -> list[Float]:
            q = (iscale * x[i]).round_even().at_most(top).at_least(bottom)
            levels[i] = q
            weight = x[i] * x[i]
            return [sum_lx + weight * x[i] * q, sum_l2 + weight * q * q]

        def improve(i: Any, sum_lx: Float, sum_l2: Float) -> list[Float]:
            value, q = x[i], levels[i]
            weight = value * value
            lx, l2 = sum_lx - weight * value * q, sum_l2 - weight * q * q
            trial = (value * l2 / lx).nearest_int().at_most(top).at_least(bottom)
            new_lx, new_l2 = lx + weight * value * trial, l2 + weight * trial * trial
            better = (lx > zero) & trial.differs(q) & (new_l2 > zero)
            better = better & (new_lx * new_lx * sum_l2 > sum_lx * sum_lx * new_l2)
            levels[i] = better.pick(trial, q)
            return [better.pick(new_lx, sum_lx), better.pick(new_l2, sum_l2)]

        state = v.fold(n, [zero, zero], start)
        # A lane that changed nothing in a sweep changes nothing in the next: all lanes may do all five.
        with v.steps(5, state) as (_, old, new):
            new.extend(v.fold(n, old, improve))
        sum_lx, sum_l2 = state
        v.each(n, lambda i: levels.put(i, dead.pick(zero, levels[i] + v.const(half))))
        scale = (sum_l2 > zero).pick(sum_lx / sum_l2, zero)
        out[0] = dead.pick(zero, scale)

    return _kernel(3, emit)


def _extreme(v: Lanes, x: Any, n: int) -> tuple[Float, Float]:
    """The first value of largest magnitude in each lane, and that magnitude."""

    def compare(i: Any, extreme: Float, magnitude: Float) -> list[Float]:
        size = x[i].abs()
        larger = size > magnitude
        return [larger.pick(x[i], extreme), larger.pick(size, magnitude)]

    extreme, magnitude = v.fold(n, [v.const(0), v.const(0)], compare)
    return extreme, magnitude


def _trial_sums(
    x: Array, w: Array, trial: Array, level: Any, i: Any, sum_l: Float, sum_l2: Float, sum_xl: Float
) -> list[Float]:
    """One value's share of the least-squares sums; its level is kept in `trial`."""
    q = level(x[i])
    trial[i] = q
    wl = w[i] * q
    return [sum_l + wl, sum_l2 + wl * q, sum_xl + wl * x[i]]


def nonlinear(n: int, values: tuple[int, ...], tries: int, lanes: int) -> Any:
    """x ~ scale * values[level] (IQ4): kernel(x, w, levels, out), out = [scale, unused]; levels are left alone.

    The level of v is the number of midpoints of `values` that are not above v, which is ggml's best_index_int8.
    """
    middles = [(a + b) / 2 for a, b in itertools.pairwise(values)]

    def emit(builder: Any, x_at: Any, w_at: Any, _levels_at: Any, out_at: Any) -> None:
        v = Lanes(builder, lanes)
        x, w, out = (v.array(a) for a in (x_at, w_at, out_at))
        zero, lowest = v.const(0), v.const(values[0])

        def sums(inverse: Float) -> list[Float]:
            def add(i: Any, sum_qx: Float, sum_q2: Float) -> list[Float]:
                scaled, q = inverse * x[i], lowest
                for middle, value in zip(middles, values[1:], strict=True):
                    q = (scaled < v.const(middle)).pick(q, v.const(value))
                wq = w[i] * q
                return [sum_qx + wq * x[i], sum_q2 + wq * q]

            return v.fold(n, [zero, zero], add, unroll=1)

        extreme, magnitude = _extreme(v, x, n)
        dead = magnitude < v.const(EPSILON)
        sum_qx, sum_q2 = sums(v.const(1) / (-extreme / lowest))
        scale = (sum_q2 > zero).pick(sum_qx / sum_q2, zero)
        state = [scale * sum_qx, scale]
        numerators = v.table([values[0] + k for k in range(-tries, tries + 1)])
        with v.steps(2 * tries + 1, state) as (index, old, new):
            sum_qx, sum_q2 = sums(v.entry(numerators, index) / extreme)
            better = (sum_q2 > zero) & (sum_qx * sum_qx > old[0] * sum_q2)
            scale = sum_qx / sum_q2
            new += [better.pick(scale * sum_qx, old[0]), better.pick(scale, old[1])]
        out[0] = dead.pick(zero, state[1])

    return _kernel(4, emit)
