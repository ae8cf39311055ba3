"""Choosing types for a goal: the knapsack against brute force, and the search against a model whose loss is known."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgellama.cli.main import main
from edgellama.errors import DoesNotFitError, UsageError
from edgellama.gguf_io import GGMLType, read
from edgellama.quantize import Options, allocate, errors, quantize_file
from edgellama.quantize.allocate import Candidate
from edgellama.quantize.api import Job
from edgellama.quantize.choice import Overrides, category
from edgellama.quantize.optimize import Goal, Optimizer

T = GGMLType


def random_candidates(rng: np.random.Generator, tensors: int) -> dict[str, list[Candidate]]:
    kinds = (T.Q2_K, T.Q4_K, T.Q6_K, T.Q8_0)
    found = {}
    for index in range(tensors):
        sizes = np.sort(rng.choice(np.arange(10, 200), len(kinds), replace=False))
        losses = np.sort(rng.random(len(kinds)))[::-1]
        found[f"t{index}"] = [Candidate(k, int(s), float(x)) for k, s, x in zip(kinds, sizes, losses, strict=True)]
    return found


def test_the_choice_is_near_the_best_there_is() -> None:
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(60):
        candidates = random_candidates(rng, 5)
        smallest = sum(found[0].nbytes for found in candidates.values())
        largest = sum(found[-1].nbytes for found in candidates.values())
        limit = int(rng.integers(smallest, largest + 1))
        chosen = allocate.allocate(candidates, limit)
        assert sum(c.nbytes for c in chosen.values()) <= limit
        best = min(
            sum(c.loss for c in choice)
            for choice in itertools.product(*candidates.values())
            if sum(c.nbytes for c in choice) <= limit
        )
        ratios.append(sum(c.loss for c in chosen.values()) / best)
    assert np.median(ratios) < 1.05
    assert max(ratios) < 1.6  # five tensors are the worst case: one step is a large part of the whole


def test_more_room_never_loses_more_and_too_little_is_told() -> None:
    candidates = random_candidates(np.random.default_rng(1), 40)
    smallest = sum(found[0].nbytes for found in candidates.values())
    losses = [
        sum(c.loss for c in allocate.allocate(candidates, smallest + room).values()) for room in range(0, 6000, 100)
    ]
    assert all(b <= a + 0.05 for a, b in itertools.pairwise(losses))
    assert losses[-1] == pytest.approx(sum(found[-1].loss for found in candidates.values()))
    with pytest.raises(DoesNotFitError, match="the smallest types take"):
        allocate.allocate(candidates, smallest - 1)


def test_errors_of_a_sample_are_those_of_the_whole(make_model: Callable[..., Path]) -> None:
    job = Job(make_model("small", layers=2), "x.gguf", Options())
    tensors = [t for t in job.header.tensors if len(t.shape) > 1]
    whole, sample = (
        errors.measure(tensors, job.header.paths, job.weights, job.true_weights, sample_weights=n, threads=2)
        for n in (1 << 30, 1 << 14)
    )
    for name, found in whole.items():
        assert list(found) == list(errors.LADDER)
        assert found[T.Q8_0] < found[T.Q6_K] < found[T.Q5_K] < found[T.Q4_K] < found[T.Q3_K] < found[T.Q2_K] < 0.2
        for kind, value in found.items():
            assert sample[name][kind] == pytest.approx(value, rel=0.3)


class KnownLoss:
    """Measures a file as if each kind of weight mattered by a known factor."""

    def __init__(self, source: Path, factors: dict[str, float]) -> None:
        self.factors, self.calls = factors, 0
        job = Job(source, "x.gguf", Options())
        tensors = [t for t in job.header.tensors if len(t.shape) > 1]
        self.table = errors.measure(
            tensors, job.header.paths, job.weights, job.true_weights, sample_weights=1 << 30, threads=2
        )

    def __call__(self, path: Path) -> float:
        self.calls += 1
        return sum(
            self.factors.get(category(t.name), 0.1) * self.table[t.name].get(t.type, 0.0)
            for t in read(path).tensors
            if t.name in self.table
        )


def test_what_matters_gets_the_bits(make_model: Callable[..., Path], tmp_path: Path) -> None:
    source = make_model("wide", layers=9)
    measured = KnownLoss(source, {"v": 5.0, "down": 1.0})
    plan = Optimizer(source, Options(threads=2), effort="normal", measure_kld=measured, workspace=tmp_path).run(
        Goal(bits_per_weight=4.6)
    )
    assert measured.calls > 9
    target = tmp_path / "out.gguf"
    result = quantize_file(source, target, Options(recipe=plan.recipe, types=plan.types, threads=2))
    assert target.stat().st_size <= plan.file_bytes
    assert result.bits_per_weight <= 4.6
    assert result.bits_per_weight > 4.5
    stock = tmp_path / "stock.gguf"
    quantize_file(source, stock, Options(recipe="Q4_K_S", threads=2))
    assert measured(target) < 0.8 * measured(stock)
    assert plan.measured_kld == pytest.approx(measured(target), rel=0.05)
    assert plan.predicted_kld == pytest.approx(measured(target), rel=0.2)
    bits = {
        kind: [t.nbytes * 8 / t.elements for t in read(target).tensors if category(t.name) == kind] for kind in "vq"
    }
    assert np.mean(bits["v"]) > np.mean(bits["q"]) + 1
    assert not list(tmp_path.glob("edgellama-trial-*"))


def test_the_smallest_file_within_a_divergence(make_model: Callable[..., Path], tmp_path: Path) -> None:
    source = make_model("wide", layers=9)
    measured = KnownLoss(source, {"v": 5.0, "down": 1.0})
    most = 0.05
    plan = Optimizer(source, Options(threads=2), measure_kld=measured, workspace=tmp_path).run(Goal(max_kld=most))
    assert plan.measured_kld is not None
    assert 0.8 * most < plan.measured_kld <= most
    with pytest.raises(UsageError, match="calibration text"):
        Optimizer(source, Options()).run(Goal(max_kld=most))


def test_decisions_are_reproducible_kept_and_explained(
    make_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_model("small", layers=2)
    targets = [tmp_path / "a.gguf", tmp_path / "b.gguf"]
    stock = tmp_path / "stock.gguf"
    quantize_file(source, stock, Options(recipe="Q4_K_M", overrides=Overrides(embedding_type=T.Q8_0)))
    size = stock.stat().st_size
    for target in targets:
        words = ["quantize", str(source), str(target), "--target-size", f"{size}B", "--token-embedding-type", "q8_0"]
        assert main([*words, "--effort", "quick", "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert said["bytes"] < target.stat().st_size <= size
    assert targets[0].read_bytes() == targets[1].read_bytes()
    records = [json.loads((tmp_path / f"{target.name}.decisions.json").read_text()) for target in targets]
    assert records[0] == records[1]
    held = {t.name: t.type.name for t in read(targets[0]).tensors}
    assert held["token_embd.weight"] == "Q8_0"  # what the user fixed stays
    for row in records[0]["tensors"]:
        assert held[row["name"]] == row["type"]
    assert main(["quantize", str(source), str(targets[0]), "--target-size", "100KB"]) == 5
    assert main(["quantize", str(source), str(targets[0]), "--target-size", "1MB", "--target-bpw", "4"]) == 2
    assert targets[0].read_bytes() == targets[1].read_bytes()


def test_protection_raises_and_tells_its_cost(
    make_model: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_model("wide", layers=9)
    plain, safe = tmp_path / "plain.gguf", tmp_path / "safe.gguf"
    quantize_file(source, plain, Options(recipe="Q3_K_S"))
    assert main(["quantize", str(source), str(safe), "--recipe", "Q3_K_S", "--protect"]) == 0
    told = capsys.readouterr().err
    extra = safe.stat().st_size - plain.stat().st_size
    assert f"costs {extra:,} bytes" in told
    before, after = ({t.name: t.type for t in read(path).tensors} for path in (plain, safe))
    raised = {name for name in before if before[name] is not after[name]}
    assert {"token_embd.weight", "blk.0.attn_v.weight", "blk.8.attn_q.weight", "blk.7.attn_output.weight"} <= raised
    assert not any(name.startswith(f"blk.{layer}.") for name in raised for layer in range(2, 7))
    assert not any("ffn" in name for name in raised)
    assert after["token_embd.weight"] is T.Q8_0
    with pytest.raises(UsageError, match="known are q8, f16"):
        Job(source, plain, Options(protect="all"))


def test_goals_that_mean_nothing_are_refused(make_model: Callable[..., Path]) -> None:
    with pytest.raises(UsageError, match="one goal"):
        Goal()
    with pytest.raises(UsageError, match="must be positive"):
        Goal(bits_per_weight=-1.0)
    source = make_model("small", layers=2)
    fixed = Options(overrides=Overrides(patterns=((".*", T.Q4_K),)))
    with pytest.raises(UsageError, match="no tensor whose type"):
        Optimizer(source, fixed)
