"""Perplexity and KL divergence as llama-perplexity defines them: means over positions, with their standard errors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgellama.errors import NumericError

_BLOCK_ROWS = 16
"""Rows looked at together: they should stay in the cache."""
_FLOOR = np.float32(-16.0)
"""Tokens less likely than this, in the base's eyes, do not count."""


def mean_and_error(total: float, total_of_squares: float, count: int) -> tuple[float, float]:
    """Mean, and its standard error (0 for ten values or fewer)."""
    if count < 1:
        return 0.0, 0.0
    mean = total / count
    variance = total_of_squares / count - mean * mean
    return mean, math.sqrt(variance / (count - 1)) if variance > 0 and count > 10 else 0.0


def _log_sums(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """log(sum(exp(row))) of each row."""
    largest = logits.max(axis=1)
    if not np.isfinite(largest).all():
        raise NumericError("the model's logits are not finite", "`edgellama doctor` shows what its device did wrong")
    sums: NDArray[np.float64] = np.exp(logits - largest[:, None]).sum(axis=1, dtype=np.float64)
    found: NDArray[np.float64] = largest + np.log(sums)
    return found


@dataclass(slots=True)
class Perplexity:
    """Sums over the positions seen so far."""

    count: int = 0
    nll: float = 0.0
    nll2: float = 0.0

    def add(self, logits: NDArray[np.float32], targets: NDArray[np.int32]) -> None:
        """Positions with their next tokens: float32[n, vocabulary], int32[n]."""
        for start in range(0, len(targets), _BLOCK_ROWS):
            rows, wanted = logits[start : start + _BLOCK_ROWS], targets[start : start + _BLOCK_ROWS]
            values = _log_sums(rows) - rows[np.arange(len(wanted)), wanted]
            self.nll += float(values.sum())
            self.nll2 += float((values * values).sum())
        self.count += len(targets)

    def figures(self) -> dict[str, float]:
        """`ppl` and its standard error."""
        mean, error = mean_and_error(self.nll, self.nll2, self.count)
        ppl = math.exp(mean)
        return {"ppl": ppl, "stderr": ppl * error}


@dataclass(slots=True)
class Divergence:
    """Kullback-Leibler divergence from a base model's distribution, and how the two perplexities relate."""

    model: Perplexity = field(default_factory=Perplexity)
    base: Perplexity = field(default_factory=Perplexity)
    nll_product: float = 0.0
    same_top: int = 0
    kld: list[NDArray[np.float64]] = field(default_factory=list)
    """One array per `add`."""
    p_diff: list[NDArray[np.float32]] = field(default_factory=list)
    """Probability of the true token, minus what the base gave it."""

    def add(self, logits: NDArray[np.float32], base: NDArray[np.float32], targets: NDArray[np.int32]) -> None:
        """Positions with their next tokens: float32[n, vocabulary], log-probabilities of the base, int32[n]."""
        for start in range(0, len(targets), _BLOCK_ROWS):
            part = slice(start, start + _BLOCK_ROWS)
            self._add(logits[part], base[part], targets[part])

    def _add(self, logits: NDArray[np.float32], base: NDArray[np.float32], targets: NDArray[np.int32]) -> None:
        places = np.arange(len(targets))
        log_sums = _log_sums(logits)
        nll = log_sums - logits[places, targets]
        nll_base = -base[places, targets].astype(np.float64)
        for side, values in ((self.model, nll), (self.base, nll_base)):
            side.count += len(values)
            side.nll += float(values.sum())
            side.nll2 += float((values * values).sum())
        self.nll_product += float((nll * nll_base).sum())
        gap = base - logits + log_sums.astype(np.float32)[:, None]
        weights = np.where(base > _FLOOR, np.exp(base), np.float32(0))
        self.kld.append(np.einsum("ij,ij->i", weights, gap, dtype=np.float64))
        self.same_top += int((logits.argmax(axis=1) == base.argmax(axis=1)).sum())
        self.p_diff.append((np.exp(-nll) - np.exp(-nll_base)).astype(np.float32))

    def running(self) -> dict[str, float]:
        """The mean so far, cheap enough for every chunk."""
        return {"kld_mean": sum(float(part.sum()) for part in self.kld) / max(1, self.model.count)}

    def figures(self) -> dict[str, float]:
        """All figures of llama-perplexity's tables; probabilities as fractions, not percent."""
        kld = np.concatenate(self.kld)
        p_diff = np.concatenate(self.p_diff).astype(np.float64)
        count = len(kld)
        mean, error = mean_and_error(float(kld.sum()), float((kld * kld).sum()), count)
        percent = {name: float(np.percentile(kld, q)) for name, q in _PERCENTILES}
        square, square_error = mean_and_error(float((p_diff**2).sum()), float((p_diff**4).sum()), count)
        agreement = self.same_top / count
        rms = math.sqrt(square)
        return {
            "kld_mean": mean,
            "kld_stderr": error,
            **percent,
            "kld_max": float(kld.max()),
            "top_agreement": agreement,
            "top_agreement_stderr": math.sqrt(agreement * (1 - agreement) / max(1, count - 1)),
            "p_diff_rms": rms,
            "p_diff_rms_stderr": 0.5 / rms * square_error if rms else 0.0,
            **self._ratio(),
        }

    def _ratio(self) -> dict[str, float]:
        count = self.model.count
        log, log_error = mean_and_error(self.model.nll, self.model.nll2, count)
        log_base, base_error = mean_and_error(self.base.nll, self.base.nll2, count)
        covariance = 0.0
        if count >= 10:
            covariance = (self.nll_product / count - log * log_base) / (count - 1)
        spread = math.sqrt(max(0.0, log_error**2 + base_error**2 - 2 * covariance))
        return {
            "ppl": math.exp(log),
            "ppl_stderr": math.exp(log) * log_error,
            "ppl_base": math.exp(log_base),
            "ppl_base_stderr": math.exp(log_base) * base_error,
            "ln_ppl_ratio": log - log_base,
            "ln_ppl_ratio_stderr": spread,
        }


_PERCENTILES = (
    ("kld_999", 99.9),
    ("kld_99", 99.0),
    ("kld_95", 95.0),
    ("kld_90", 90.0),
    ("kld_median", 50.0),
    ("kld_10", 10.0),
)
