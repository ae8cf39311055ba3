"""Which type each tensor gets under a limit of bytes, so that the sum of the losses is least: a knapsack, solved by the
gain per byte along each tensor's lower convex hull (Lagrange), the rest filled greedily. Deterministic."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgellama.errors import DoesNotFitError
from edgellama.gguf_io import GGMLType as T


@dataclass(frozen=True, slots=True)
class Candidate:
    """A type a tensor may get: what it costs and what it loses."""

    type: T
    nbytes: int
    loss: float


def hull(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates worth taking, smallest first: each larger one gains more per byte than all that come after it."""
    kept: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.nbytes, c.loss)):
        if kept and candidate.loss >= kept[-1].loss:
            continue
        while len(kept) > 1 and _slope(kept[-2], kept[-1]) <= _slope(kept[-2], candidate):
            kept.pop()
        kept.append(candidate)
    return kept


def _slope(small: Candidate, large: Candidate) -> float:
    return (small.loss - large.loss) / (large.nbytes - small.nbytes)


def allocate(candidates: Mapping[str, Sequence[Candidate]], limit_bytes: int) -> dict[str, Candidate]:
    """The choice for each tensor. Raises DoesNotFitError when even the smallest types take more."""
    hulls = {name: hull(found) for name, found in candidates.items()}
    chosen = {name: steps[0] for name, steps in hulls.items()}
    used = sum(candidate.nbytes for candidate in chosen.values())
    if used > limit_bytes:
        raise DoesNotFitError(
            f"the smallest types take {used:,} bytes for the weights, the limit leaves {limit_bytes:,}",
            "allow a larger file, or take a recipe of fewer bits (--list)",
        )
    queue: list[tuple[float, str, int]] = []

    def offer(name: str, index: int) -> None:
        steps = hulls[name]
        if index + 1 < len(steps):
            heapq.heappush(queue, (-_slope(steps[index], steps[index + 1]), name, index))

    for name in hulls:
        offer(name, 0)
    while queue:  # a step that does not fit any more is left out, smaller ones may still fit
        _, name, index = heapq.heappop(queue)
        step = hulls[name][index + 1]
        extra = step.nbytes - hulls[name][index].nbytes
        if used + extra <= limit_bytes:
            used += extra
            chosen[name] = step
            offer(name, index + 1)
    return _filled(candidates, chosen, limit_bytes - used)


def _filled(
    candidates: Mapping[str, Sequence[Candidate]], chosen: dict[str, Candidate], room: int
) -> dict[str, Candidate]:
    """Spend what is left on the single changes that gain most."""
    while True:
        best: tuple[float, str, Candidate] | None = None
        for name, now in chosen.items():
            for other in candidates[name]:
                gain = now.loss - other.loss
                if gain > 0 and other.nbytes - now.nbytes <= room and (best is None or gain > best[0]):
                    best = gain, name, other
        if best is None:
            return chosen
        _, name, step = best
        room -= step.nbytes - chosen[name].nbytes
        chosen[name] = step
