"""Runs a program on several threads: every thread walks the same operations and meets the others behind them."""

from __future__ import annotations

from edgellama.engine.jit.kernels import layout as at
from edgellama.engine.jit.kernels.compiled import helper
from edgellama.engine.jit.kernels.gemm import LEAST_COLUMNS
from edgellama.engine.jit.kernels.memory import atomic_add, atomic_load, atomic_store, call0, call4, longs, pause

_SPINS = 4000
"""Turns of a waiting loop, a few tens of microseconds, before the thread gives its core away."""


@helper
def _meet(control: int, threads: int, program: int, first: int, last: int, give_way: int) -> bool:
    """Wait for all threads behind operations [first, last]. The last to arrive makes their counters ready for the next
    run, and decides for all whether to stop. False after `abort`."""
    generation = atomic_load(control + 8 * at.GENERATION)
    if atomic_add(control + 8 * at.ARRIVED, 1) == threads - 1:
        for i in range(first, last + 1):
            longs(program + 8 * at.OPERATION_WORDS * i)[at.COUNTER] = 0
        longs(control)[at.ARRIVED] = 0
        longs(control)[at.TICKS] += 1
        longs(control)[at.STOPPED] = atomic_load(control + 8 * at.STOP)
        atomic_store(control + 8 * at.GENERATION, generation + 1)
    else:
        spins = 0
        while atomic_load(control + 8 * at.GENERATION) == generation:
            pause()
            spins += 1
            if spins > _SPINS and give_way != 0:
                call0(give_way)
    return bool(longs(control)[at.STOPPED] == 0)


def run(program: int, operations: int, step: int, control: int, thread: int, threads: int, give_way: int) -> bool:
    """Walk the program; all arguments but the numbers are addresses. False when it was stopped."""
    first = 0
    for i in range(operations):
        op = program + 8 * at.OPERATION_WORDS * i
        call4(longs(op)[at.FUNCTION], op, step, thread, threads)
        meet = longs(op)[at.BARRIER]
        if meet == at.ALWAYS or (meet == at.MANY and longs(step)[at.TOKENS] >= LEAST_COLUMNS):
            if not _meet(control, threads, program, first, i, give_way):
                return False
            first = i + 1
    return True
