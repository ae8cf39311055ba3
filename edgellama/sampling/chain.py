"""The sampler chain: logits of one position in, one token out.

Order and rules are llama.cpp's: logit bias, penalties, top-k, top-p, min-p, temperature, draw; float32 where llama.cpp
uses float32. Where llama.cpp leaves an order open (equal logits), the lower token id comes first here. Every operation
is either exact or correctly rounded, so that the same logits and seed give the same token on every machine.
"""

from __future__ import annotations

import math
import os
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgellama.errors import NumericError, UsageError
from edgellama.sampling import random
from edgellama.sampling.exponential import exp
from edgellama.sampling.options import BUILT_IN, SamplingOptions, merge

_STATE = struct.Struct("<BQQ")
_STATE_VERSION = 1
_LARGEST = np.finfo(np.float32).max
_FIRST_TRY = 256
"""Candidates sorted at first for a top-p without a top-k."""


@dataclass(slots=True)
class Candidates:
    """Tokens still in the race: `ids` int[n] and their `logits` float32[n]. `sorted`: largest logit first."""

    ids: NDArray[np.intp]
    logits: NDArray[np.float32]
    sorted: bool = False

    def __len__(self) -> int:
        return len(self.ids)

    def weights(self) -> NDArray[np.float32]:
        """exp(logit - largest), float32[n]: probabilities before the division by their sum."""
        top = self.logits[0] if self.sorted else self.logits.max()
        return exp(self.logits - top)

    def first(self, n: int) -> Candidates:
        """The first n."""
        return Candidates(self.ids[:n], self.logits[:n], self.sorted)


def check_finite(logits: NDArray[np.float32]) -> None:
    """Raise `NumericError` when any value of float32[n_vocab] is NaN or infinite."""
    if math.isfinite(logits.max()) and math.isfinite(logits.min()):  # both carry NaN along
        return
    nans, infinities = int(np.isnan(logits).sum()), int(np.isinf(logits).sum())
    raise NumericError(
        f"the engine computed {nans:,} NaN and {infinities:,} infinite of {len(logits):,} logits",
        "edgellama doctor shows what its check of the numbers found; try --gpu-layers 0, or fetch the file again",
    )


def largest(logits: NDArray[np.float32], k: int) -> Candidates:
    """The k largest of float32[n_vocab], largest first, equal ones by id, without sorting the vocabulary."""
    n = len(logits)
    k = min(k, n)
    # A lower bound of the k-th largest: the k-th largest among the maxima of at least 4k groups.
    groups = max(4 * k, n // 256)
    if groups * 2 <= n:
        maxima = logits[: n // groups * groups].reshape(-1, groups).max(axis=0)
        ids = np.flatnonzero(logits >= np.partition(maxima, groups - k)[groups - k])
    else:
        ids = np.flatnonzero(logits >= np.partition(logits, n - k)[n - k])
    values = logits[ids]
    order = np.argsort(-values, kind="stable")[:k]  # ids ascend, so a stable sort leaves equal ones by id
    return Candidates(ids[order], values[order], sorted=True)


def top_k(candidates: Candidates, k: int) -> Candidates:
    """Keep the k most likely; k <= 0 keeps all."""
    if k <= 0:
        return candidates
    if candidates.sorted:
        return candidates.first(k)
    found = largest(candidates.logits, k)
    return Candidates(candidates.ids[found.ids], found.logits, sorted=True)


def top_p(candidates: Candidates, p: float) -> Candidates:
    """Keep the most likely until their probabilities reach p; p >= 1 keeps all."""
    if p >= 1.0:
        return candidates
    weights = candidates.weights()
    total = np.cumsum(weights)[-1]  # one after the other in float32, as llama.cpp sums
    for count in _counts_to_try(candidates, weights, p):
        ranked = top_k(candidates, count)
        probabilities = (weights if candidates.sorted else ranked.weights()) / total
        reached = int(np.searchsorted(np.cumsum(probabilities), np.float32(p)))
        if reached < len(ranked):
            return ranked.first(reached + 1)
    return ranked


def _counts_to_try(candidates: Candidates, weights: NDArray[np.float32], p: float) -> Iterator[int]:
    """How many to sort for a top-p: few, then what the bins say, then all."""
    if not candidates.sorted:
        yield _FIRST_TRY
        yield _likely_count(candidates, weights, p)
    yield len(candidates)


def _likely_count(candidates: Candidates, weights: NDArray[np.float32], p: float) -> int:
    """How many of the most likely reach p, or a few more: by the mass in bins of their logits."""
    bins = np.minimum((candidates.logits.max() - candidates.logits) * np.float32(4), 511).astype(np.intp)
    mass = np.cumsum(np.bincount(bins, weights, 512))
    last = int(np.searchsorted(mass, p * mass[-1])) + 1  # one bin more than needed, for the rounding of float32
    return int(np.count_nonzero(bins <= last))


def min_p(candidates: Candidates, p: float) -> Candidates:
    """Keep those at least p times as likely as the most likely; p <= 0 keeps all."""
    if p <= 0.0:
        return candidates
    top = candidates.logits[0] if candidates.sorted else candidates.logits.max()
    keep = candidates.logits >= top + np.float32(math.log(np.float32(p)))
    return Candidates(candidates.ids[keep], candidates.logits[keep], candidates.sorted)


def temperature(candidates: Candidates, t: float) -> Candidates:
    """Divide the logits by t > 0; where that overflows float32, only the most likely stays."""
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        logits = candidates.logits / np.float32(t)
    if np.isfinite(logits.max()):
        return Candidates(candidates.ids, logits, candidates.sorted)
    return top_k(candidates, 1)


def draw(candidates: Candidates, u: float) -> int:
    """The token at the fraction u in [0, 1) of the cumulative probabilities, in the order of the candidates."""
    weights = candidates.weights()
    cumulative = np.cumsum(weights.astype(np.float64))
    place = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    if place == len(cumulative):  # u * total was rounded up to total
        place = int(np.flatnonzero(weights)[-1])
    return int(candidates.ids[place])


class Penalties:
    """Repetition, frequency and presence penalties over the last tokens of prompt and answer."""

    def __init__(self, last_n: int, repeat: float, frequency: float, presence: float) -> None:
        self._repeat = np.float32(repeat)
        self._frequency = np.float32(frequency)
        self._presence = np.float32(presence)
        self.active = last_n != 0 and (repeat != 1.0 or frequency != 0.0 or presence != 0.0)
        self._recent: deque[int] = deque(maxlen=None if last_n < 0 else last_n)
        self._counts: dict[int, int] = {}

    def accept(self, token: int) -> None:
        """The newest token of the sequence."""
        if not self.active:
            return
        if len(self._recent) == self._recent.maxlen:
            oldest = self._recent[0]
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]
        self._recent.append(token)
        self._counts[token] = self._counts.get(token, 0) + 1

    def apply(self, logits: NDArray[np.float32]) -> None:
        """Change float32[n_vocab] in place."""
        if not self._counts:
            return
        ids = np.fromiter(self._counts, np.intp, len(self._counts))
        counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
        values = logits[ids]
        with np.errstate(over="ignore"):
            values = np.where(values <= 0, values * self._repeat, values / self._repeat)
            values -= counts * self._frequency + self._presence
        logits[ids] = np.minimum(values, _LARGEST)


class Sampler:
    """The chain of one answer. `accept` every token, of the prompt with `observe`; `sample` changes nothing."""

    def __init__(
        self,
        options: SamplingOptions,
        vocabulary_tokens: int,
        *,
        end_tokens: Iterable[int] = (),
        seed: int | None = None,
    ) -> None:
        """`end_tokens` are never chosen when the options say `ignore_eos`; `seed` stands in for one not given.

        Raises `UsageError` when `logit_bias` names a token outside the vocabulary or is not a number.
        """
        chosen = merge((options, BUILT_IN))
        fallback = seed if seed is not None else int.from_bytes(os.urandom(8), "little") >> 1
        self.seed = fallback if chosen.seed is None else chosen.seed
        self._index = 0
        self._top_k = chosen.top_k or 0
        self._top_p = _value(chosen.top_p)
        self._min_p = _value(chosen.min_p)
        self._temperature = _value(chosen.temperature)
        self._penalties = Penalties(
            chosen.repeat_last_n or 0,
            _value(chosen.repeat_penalty),
            _value(chosen.frequency_penalty),
            _value(chosen.presence_penalty),
        )
        bias = dict(chosen.logit_bias or {})
        if chosen.ignore_eos:
            bias |= dict.fromkeys(end_tokens, -math.inf)
        _check_bias(bias, vocabulary_tokens)
        self._bias_ids = np.fromiter(bias, np.intp, len(bias))
        values = np.fromiter(bias.values(), np.float64, len(bias))
        values[values > -np.inf] = np.clip(values[values > -np.inf], -_LARGEST, _LARGEST)
        self._bias = values.astype(np.float32)

    def observe(self, tokens: Iterable[int]) -> None:
        """Tokens of the prompt: the penalties look back on them too."""
        for token in tokens:
            self._penalties.accept(token)

    def accept(self, token: int) -> None:
        """The next token of the answer."""
        self._penalties.accept(token)
        self._index += 1

    def sample(self, logits: NDArray[np.float32]) -> int:
        """The next token from float32[n_vocab], which is not changed. Raises `NumericError` for NaN or infinity."""
        check_finite(logits)
        if len(self._bias_ids) or self._penalties.active:
            logits = self._adjust(logits)
        if self._temperature == 0.0:
            return int(logits.argmax())  # the first of equals, as llama.cpp
        return draw(self._narrow(logits), random.uniform(self.seed, self._index))

    def _adjust(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        adjusted = logits.copy()
        with np.errstate(over="ignore"):
            adjusted[self._bias_ids] = np.minimum(adjusted[self._bias_ids] + self._bias, _LARGEST)
        self._penalties.apply(adjusted)
        if adjusted.max() == -np.inf:
            raise UsageError("logit_bias forbids every token")
        return adjusted

    def _narrow(self, logits: NDArray[np.float32]) -> Candidates:
        all_tokens = self._top_k <= 0
        candidates = Candidates(np.arange(len(logits)), logits) if all_tokens else largest(logits, self._top_k)
        return temperature(min_p(top_p(candidates, self._top_p), self._min_p), self._temperature)

    def state(self) -> bytes:
        """What a new `Sampler` needs beside the tokens to go on: seed and index of the next token."""
        return _STATE.pack(_STATE_VERSION, self.seed, self._index)

    def restore(self, state: bytes) -> None:
        """Take over what `state` returned. Raises `UsageError` for bytes of another version or kind."""
        if len(state) != _STATE.size or state[0] != _STATE_VERSION:
            raise UsageError(f"a sampler state of {len(state)} bytes is not of version {_STATE_VERSION}")
        _, self.seed, self._index = _STATE.unpack(state)


def _value(option: float | None) -> float:
    return 0.0 if option is None else option


def _check_bias(bias: dict[int, float], vocabulary_tokens: int) -> None:
    for token, value in bias.items():
        if not 0 <= token < vocabulary_tokens:
            raise UsageError(f"logit_bias names token {token}, the vocabulary has {vocabulary_tokens:,}")
        if math.isnan(value):
            raise UsageError(f"logit_bias of token {token} is not a number")
