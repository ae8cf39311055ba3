"""Which cell of the KV cache holds which position of which sequence. Cells are shared between sequences by counting.

Every sequence has a table from position to cell, so that attention walks its own positions only, whatever else the
cache holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellama.engine.base import Batch
from edgellama.errors import ContextOverflowError, EngineError

NO_CELL = -1


@dataclass(slots=True)
class Step:
    """What one pass computes: arrays of length n, and the rows whose result is wanted."""

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    sequences: NDArray[np.int32]
    cells: NDArray[np.int32]
    wanted: NDArray[np.int32]
    """Row numbers, ascending."""


class Cells:
    """Tables of `sequences` sequences with up to `context` positions each."""

    def __init__(self, sequences: int, context: int) -> None:
        self.context = context
        self.count = sequences * context
        self.table = np.full((sequences, context), NO_CELL, np.int32)
        """Cell of each position, int32[sequences, context]."""
        self._lengths = [0] * sequences
        self._users = np.zeros(self.count, np.int32)
        self._recycled: list[int] = []
        self._untouched = 0

    def length(self, sequence: int) -> int:
        """Largest position + 1."""
        return self._lengths[sequence]

    def held(self, sequence: int) -> NDArray[np.intp]:
        """Positions the sequence holds, ascending."""
        return np.flatnonzero(self.table[sequence, : self._lengths[sequence]] != NO_CELL)

    def place(self, batch: Batch, start: int, stop: int) -> Step:
        """Give the rows [start, stop) of `batch` their cells. `check` must have accepted the batch."""
        chosen = slice(start, stop)
        positions, sequences = batch.positions[chosen], batch.sequences[chosen]
        cells = np.array([self._take() for _ in range(stop - start)], np.int32)
        self.table[sequences, positions] = cells
        for sequence, position in zip(sequences.tolist(), positions.tolist(), strict=True):
            self._lengths[sequence] = max(self._lengths[sequence], position + 1)
        wanted = np.flatnonzero(batch.want_logits[chosen]).astype(np.int32)
        return Step(
            np.ascontiguousarray(batch.tokens[chosen], np.int32),
            np.ascontiguousarray(positions, np.int32),
            np.ascontiguousarray(sequences, np.int32),
            cells,
            wanted,
        )

    def check(self, batch: Batch) -> None:
        """Raise `EngineError` unless every position goes on where its sequence ends, in the batch's order."""
        ends: dict[int, int] = {}
        for sequence, position in zip(batch.sequences.tolist(), batch.positions.tolist(), strict=True):
            end = ends.get(sequence, self._lengths[sequence])
            if position != end:
                raise EngineError(f"sequence {sequence} ends at position {end}, the batch has position {position}")
            ends[sequence] = end + 1
        last = max(ends.values(), default=0)
        if last > self.context:
            raise ContextOverflowError(last, self.context)

    def remove(self, sequence: int, start: int, stop: int) -> None:
        """Forget positions [start, stop)."""
        row = self.table[sequence, start:stop]
        for cell in row[row != NO_CELL].tolist():
            self._drop(cell)
        row[:] = NO_CELL
        self._measure(sequence)

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """Let `target` share [start, stop) of `source`; it holds none of them."""
        row = self.table[source, start:stop]
        self._users[row[row != NO_CELL]] += 1
        self.table[target, start:stop] = row
        self._measure(target)

    def move(self, sequence: int, start: int, stop: int, delta: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Add `delta` to the positions [start, stop): (their cells from now on, the cells whose content these need).

        Cells that other sequences share are replaced by own ones, so that those keep their positions.
        """
        row = self.table[sequence, start:stop].copy()
        held = row != NO_CELL
        before = row[held]
        after = np.array([self._own(cell) for cell in before.tolist()], np.int32)
        row[held] = after
        self.table[sequence, start:stop] = NO_CELL
        target = self.table[sequence, start + delta : stop + delta]
        overwritten = target[held & (target != NO_CELL)]
        for cell in overwritten.tolist():
            self._drop(cell)
        target[held] = after
        self._measure(sequence)
        return after, before

    def fill(self, sequence: int, positions: NDArray[np.intp]) -> NDArray[np.int32]:
        """Give an empty sequence own cells for `positions`."""
        cells = np.array([self._take() for _ in range(len(positions))], np.int32)
        self.table[sequence, positions] = cells
        self._measure(sequence)
        return cells

    def _own(self, cell: int) -> int:
        if self._users[cell] == 1:
            return cell
        self._users[cell] -= 1
        return self._take()

    def _take(self) -> int:
        if self._recycled:
            cell = self._recycled.pop()
        else:  # there are as many cells as all tables have places, so one is always left
            cell = self._untouched
            self._untouched += 1
        self._users[cell] = 1
        return cell

    def _drop(self, cell: int) -> None:
        self._users[cell] -= 1
        if self._users[cell] == 0:
            self._recycled.append(cell)

    def _measure(self, sequence: int) -> None:
        held = np.flatnonzero(self.table[sequence] != NO_CELL)
        self._lengths[sequence] = int(held[-1]) + 1 if len(held) else 0
        if not self._users.any():  # start again at the front: neighbours in time become neighbours in memory
            self._recycled.clear()
            self._untouched = 0
