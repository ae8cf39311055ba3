"""The figures against their definitions, computed in float64 without a trick."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edgellama.errors import InvalidFileError, NumericError
from edgellama.evaluate import logits_file
from edgellama.evaluate.statistics import Divergence, Perplexity

ROWS, VOCABULARY = 40, 1001


def distributions(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    weights = np.exp(wide - wide.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


@pytest.fixture(scope="module")
def sample() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((ROWS, VOCABULARY)) * 3).astype(np.float32)
    base = (logits + rng.standard_normal(logits.shape) * 0.2).astype(np.float32)
    return logits, base, rng.integers(0, VOCABULARY, ROWS).astype(np.int32)


def test_perplexity_is_the_exponential_of_the_mean_surprise(sample: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    logits, _, targets = sample
    sums = Perplexity()
    sums.add(logits[:17], targets[:17])
    sums.add(logits[17:], targets[17:])
    surprise = -np.log(distributions(logits)[np.arange(ROWS), targets])
    figures = sums.figures()
    assert figures["ppl"] == pytest.approx(math.exp(surprise.mean()), rel=1e-6)
    assert figures["stderr"] == pytest.approx(
        math.exp(surprise.mean()) * surprise.std() / math.sqrt(ROWS - 1), rel=1e-5
    )


def test_divergence_is_that_of_the_distributions(sample: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    logits, base, targets = sample
    p, q = distributions(base), distributions(logits)
    sums = Divergence()
    sums.add(logits, np.log(p).astype(np.float32), targets)
    figures = sums.figures()
    expected = (p * (np.log(p) - np.log(q))).sum(axis=1)
    assert figures["kld_mean"] == pytest.approx(expected.mean(), rel=1e-4)
    assert figures["kld_max"] == pytest.approx(expected.max(), rel=1e-4)
    assert figures["kld_99"] == pytest.approx(np.percentile(expected, 99), rel=1e-4)
    assert figures["top_agreement"] == (p.argmax(axis=1) == q.argmax(axis=1)).mean()
    change = q[np.arange(ROWS), targets] - p[np.arange(ROWS), targets]
    assert figures["p_diff_rms"] == pytest.approx(math.sqrt((change**2).mean()), rel=1e-4)


def test_logits_that_are_not_numbers_are_refused(sample: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    logits = sample[0].copy()
    logits[3, 7] = np.nan
    with pytest.raises(NumericError):
        Perplexity().add(logits, sample[2])


@pytest.mark.parametrize("vocabulary", [1000, 1001])
def test_a_written_distribution_is_read_back_within_its_step(tmp_path: object, vocabulary: int) -> None:
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal((7, vocabulary)) * 4).astype(np.float32)
    logits[2] = 1.5  # a flat distribution has no scale
    logits[3, 0] = 60  # and here everything else lies below the range
    expected = np.log(distributions(logits))
    found = logits_file.decode(logits_file.encode(logits), vocabulary)
    near = expected > expected.max(axis=1, keepdims=True) - 15.9
    assert np.abs(found - expected)[near].max() < 16 / 65535
    assert (found[~near] <= expected.max(axis=1, keepdims=True).repeat(vocabulary, 1)[~near] - 15.8).all()


def write(path: object, context: int = 16, vocabulary: int = 9, count: int = 2) -> bytes:
    import io

    stream = io.BytesIO()
    logits_file.write_header(stream, context, vocabulary, np.arange(count * context, dtype=np.int32) % vocabulary)
    rows = np.zeros((count * logits_file.rows_per_chunk(context), vocabulary), np.float32)
    stream.write(logits_file.encode(rows).tobytes())
    return stream.getvalue()


def test_damaged_files_are_refused(tmp_path: object) -> None:
    from pathlib import Path

    path = Path(str(tmp_path)) / "base.logits"
    whole = write(path)
    path.write_bytes(whole)
    with (opened := logits_file.LogitsFile.open(path)).stream:
        assert (opened.context, opened.vocabulary, opened.chunks) == (16, 9, 2)
        assert opened.rows(14) == pytest.approx(np.full((14, 9), -math.log(9)))
    cases = {
        b"_logits": "no file of log-probabilities",
        b"GGUF" + whole[4:]: "no file of log-probabilities",
        whole[:12]: "inside its header",
        whole[:-1]: "chunks need",
        whole + b"\0": "chunks need",
        whole[:8] + b"\xff" * 4 + whole[12:]: "impossible",
        whole[:20] + b"\x63\0\0\0" + whole[24:]: "outside the vocabulary",
    }
    for data, words in cases.items():
        path.write_bytes(data)
        with pytest.raises(InvalidFileError, match=words):
            logits_file.LogitsFile.open(path)
