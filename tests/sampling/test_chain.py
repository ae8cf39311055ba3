"""Each stage against llama.cpp's own sampler, the draw against its probabilities, and the state across a restart."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellama.errors import NumericError, UsageError
from edgellama.sampling import chain
from edgellama.sampling.chain import Candidates, Sampler
from edgellama.sampling.options import SamplingOptions

_VOCABULARIES = (5, 300, 1500, 49_152)


def _logits(kind: str, n: int, seed: int = 0) -> np.ndarray:
    draw = np.random.default_rng([seed, n])
    if kind == "flat":
        return draw.normal(0, 3, n).astype(np.float32)
    if kind == "peaked":
        values = draw.normal(0, 2, n)
        values[draw.choice(n, min(n, 12), replace=False)] += draw.uniform(4, 16, min(n, 12))
        return values.astype(np.float32)
    if kind == "tied":
        return draw.integers(-3, 4, n).astype(np.float32)
    return np.full(n, 1.5, np.float32)


@pytest.fixture(scope="module")
def llama() -> Any:
    return pytest.importorskip("llama_cpp.llama_cpp")


def _apply(llama: Any, sampler: Any, logits: np.ndarray, accepted: list[int] = []) -> tuple[np.ndarray, np.ndarray]:  # noqa: B006
    """Ids and logits that llama.cpp's sampler leaves, in its order."""
    data = (llama.llama_token_data * len(logits))()
    view = np.frombuffer(data, np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)]))
    view["id"], view["logit"] = np.arange(len(logits)), logits
    array = llama.llama_token_data_array(data=data, size=len(logits), selected=-1, sorted=False)
    for token in accepted:
        llama.llama_sampler_accept(sampler, token)
    llama.llama_sampler_apply(sampler, ctypes.byref(array))
    llama.llama_sampler_free(sampler)
    left = view[: array.size]
    return left["id"].copy(), left["logit"].copy()


def _same(ours: Candidates, their_ids: np.ndarray, their_logits: np.ndarray) -> None:
    """Equal up to the choice among equal logits, which llama.cpp leaves open."""
    assert np.array_equal(np.sort(ours.logits), np.sort(their_logits))
    if len(their_logits) == 0:
        return
    edge = their_logits.min()
    assert set(ours.ids[ours.logits > edge].tolist()) == set(their_ids[their_logits > edge].tolist())
    p, q = ours.weights().astype(float), np.exp(their_logits.astype(float) - float(their_logits.max()))
    np.testing.assert_allclose(np.sort(p / p.sum()), np.sort(q / q.sum()), atol=1e-5)


_GRID = list(itertools.product(("flat", "peaked", "tied", "equal"), _VOCABULARIES))


def _all(logits: np.ndarray) -> Candidates:
    return Candidates(np.arange(len(logits)), logits)


@pytest.mark.llamacpp
@pytest.mark.parametrize(("kind", "n"), _GRID)
@pytest.mark.parametrize("k", [0, 1, 2, 40, 129, 1000, 10**6])
def test_top_k(llama: Any, kind: str, n: int, k: int) -> None:
    logits = _logits(kind, n)
    ours = chain.top_k(_all(logits), k)
    _same(ours, *_apply(llama, llama.llama_sampler_init_top_k(k), logits))
    if ours.sorted:
        order = np.lexsort((np.arange(n), -logits))[: len(ours)]
        assert ours.ids.tolist() == order.tolist()


@pytest.mark.llamacpp
@pytest.mark.parametrize(("kind", "n"), _GRID)
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.95, 0.999, 1.0])
def test_top_p(llama: Any, kind: str, n: int, p: float) -> None:
    logits = _logits(kind, n)
    ours = chain.top_p(_all(logits), p)
    ids, values = _apply(llama, llama.llama_sampler_init_top_p(p, 0), logits)
    if kind == "equal" or (kind == "tied" and n > 10_000):
        # Sums of thousands of equal float32 drift by the order of additions: one candidate more or less.
        assert abs(len(ours) - len(ids)) <= 1
    else:
        _same(ours, ids, values)


@pytest.mark.llamacpp
@pytest.mark.parametrize(("kind", "n"), _GRID)
@pytest.mark.parametrize("p", [0.0, 0.05, 0.5, 1.0])
def test_min_p(llama: Any, kind: str, n: int, p: float) -> None:
    logits = _logits(kind, n)
    ours = chain.min_p(_all(logits), p)
    ids, values = _apply(llama, llama.llama_sampler_init_min_p(p, 0), logits)
    assert ours.ids.tolist() == ids.tolist()
    _same(ours, ids, values)


@pytest.mark.llamacpp
@pytest.mark.parametrize("t", [0.01, 0.8, 1.0, 7.5])
def test_temperature(llama: Any, t: float) -> None:
    logits = _logits("flat", 1500)
    ids, values = _apply(llama, llama.llama_sampler_init_temp(t), logits)
    _same(chain.temperature(_all(logits), t), ids, values)


@pytest.mark.llamacpp
@pytest.mark.parametrize("last_n", [0, 1, 7, 64])
@pytest.mark.parametrize(
    ("repeat", "frequency", "presence"), [(1.0, 0.0, 0.0), (1.3, 0.0, 0.0), (0.8, 0.4, 0.1), (1.1, -0.5, 1.5)]
)
def test_penalties(llama: Any, last_n: int, repeat: float, frequency: float, presence: float) -> None:
    logits = _logits("flat", 300)
    tokens = np.random.default_rng(4).integers(0, 30, 100).tolist()
    penalties = chain.Penalties(last_n, repeat, frequency, presence)
    for token in tokens:
        penalties.accept(token)
    ours = logits.copy()
    penalties.apply(ours)
    sampler = llama.llama_sampler_init_penalties(len(logits), last_n, repeat, frequency, presence)
    ids, values = _apply(llama, sampler, logits, tokens)
    np.testing.assert_allclose(ours[ids], values, rtol=1e-6)


@pytest.mark.llamacpp
@pytest.mark.parametrize("kind", ["flat", "peaked", "tied"])
def test_the_whole_default_chain(llama: Any, kind: str) -> None:
    logits = _logits(kind, 49_152)
    recent = np.random.default_rng(1).integers(0, 49_152, 90).tolist()
    wanted = {3: 4.0, 17: -math.inf, 40_000: 1.5}
    options = SamplingOptions(repeat_penalty=1.2, frequency_penalty=0.1, logit_bias=wanted)
    sampler = Sampler(options, 49_152, seed=1)
    sampler.observe(recent[:50])
    for token in recent[50:]:
        sampler.accept(token)
    ours = sampler._narrow(sampler._adjust(logits))

    whole = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
    biases = (llama.llama_logit_bias * 3)()
    for place, (token, bias) in zip(biases, wanted.items(), strict=True):
        place.token, place.bias = token, bias
    for stage in (
        llama.llama_sampler_init_logit_bias(49_152, 3, biases),
        llama.llama_sampler_init_penalties(49_152, 64, 1.2, 0.1, 0.0),
        llama.llama_sampler_init_top_k(40),
        llama.llama_sampler_init_top_p(0.95, 0),
        llama.llama_sampler_init_min_p(0.05, 0),
        llama.llama_sampler_init_temp(0.8),
    ):
        llama.llama_sampler_chain_add(whole, stage)
    _same(ours, *_apply(llama, whole, logits, recent))


@pytest.mark.llamacpp
@pytest.mark.parametrize("kind", ["flat", "peaked", "tied", "equal"])
def test_greedy_takes_the_token_of_llama_cpps_greedy_sampler(llama: Any, kind: str) -> None:
    for seed in range(20):
        logits = _logits(kind, 1500, seed)
        data = (llama.llama_token_data * len(logits))()
        view = np.frombuffer(data, np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)]))
        view["id"], view["logit"] = np.arange(len(logits)), logits
        array = llama.llama_token_data_array(data=data, size=len(logits), selected=-1, sorted=False)
        sampler = llama.llama_sampler_init_greedy()
        llama.llama_sampler_apply(sampler, ctypes.byref(array))
        llama.llama_sampler_free(sampler)
        assert Sampler(SamplingOptions(temperature=0.0), 1500).sample(logits) == data[array.selected].id


# ---- the draw


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(),
        SamplingOptions(top_k=0, top_p=1.0, min_p=0.0, temperature=1.0),
        SamplingOptions(top_k=0, top_p=0.9, min_p=0.0, temperature=1.5),
        SamplingOptions(top_k=0, top_p=1.0, min_p=0.1),
    ],
)
def test_draws_follow_the_probabilities(options: SamplingOptions) -> None:
    logits = np.linspace(0, 3, 12, dtype=np.float32)
    sampler = Sampler(options, 12, seed=11)
    left = sampler._narrow(logits)
    n = 20_000
    counts = np.zeros(12)
    for _ in range(n):
        token = sampler.sample(logits)
        counts[token] += 1
        sampler.accept(token)
    p = np.exp(left.logits.astype(float) - float(left.logits.max()))
    expected = np.zeros(12)
    expected[left.ids] = n * p / p.sum()
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    chi_square = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    assert chi_square < 40  # at most 11 degrees of freedom, p < 1e-4


@given(u=st.floats(0, 1, exclude_max=True), seed=st.integers(0, 50))
def test_a_token_without_probability_is_never_drawn(u: float, seed: int) -> None:
    logits = _logits("flat", 40, seed)
    logits[[0, 7, 39]] = -np.inf
    assert chain.draw(_all(logits), u) not in {0, 7, 39}


def test_the_ends_of_the_draw() -> None:
    logits = np.array([-np.inf, 1, 1, -np.inf], np.float32)
    assert chain.draw(_all(logits), 0.0) == 1
    assert chain.draw(_all(logits), 1 - 2**-53) == 2


def test_seeds_are_reported_and_drawn_afresh_when_missing() -> None:
    assert Sampler(SamplingOptions(seed=5), 4).seed == 5
    assert Sampler(SamplingOptions(), 4, seed=9).seed == 9
    assert len({Sampler(SamplingOptions(), 4).seed for _ in range(20)}) == 20


# ---- going on after a restart


def _stream(sampler: Sampler, logits: Iterator[np.ndarray]) -> Iterator[tuple[int, bytes]]:
    for row in logits:
        token = sampler.sample(row)
        sampler.accept(token)
        yield token, sampler.state()


_OPTIONS = st.builds(
    SamplingOptions,
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    top_k=st.sampled_from([0, 3, 40]),
    repeat_penalty=st.sampled_from([1.0, 1.4]),
    presence_penalty=st.sampled_from([0.0, 0.6]),
    repeat_last_n=st.sampled_from([-1, 4, 64]),
    seed=st.none() | st.integers(0, 2**64 - 1),
)


@settings(deadline=None)
@given(options=_OPTIONS, cut=st.integers(0, 24), prompt=st.lists(st.integers(0, 29), max_size=10))
def test_a_restart_after_any_token_changes_nothing(options: SamplingOptions, cut: int, prompt: list[int]) -> None:
    rows = [_logits("flat", 30, i) for i in range(25)]
    whole = Sampler(options, 30)
    whole.observe(prompt)
    seed = whole.seed
    stream = list(_stream(whole, iter(rows)))
    tokens = [token for token, _ in stream]

    again = Sampler(options, 30, seed=seed if cut == 0 else None)
    again.observe(prompt)
    for token in tokens[:cut]:
        again.accept(token)
    if cut:
        again.restore(stream[cut - 1][1])
    assert [token for token, _ in _stream(again, iter(rows[cut:]))] == tokens[cut:]
    assert again.seed == seed


@pytest.mark.parametrize("state", [b"", b"x", b"\x02" + bytes(16), b"\x01" + bytes(15)])
def test_a_foreign_state_is_refused(state: bytes) -> None:
    with pytest.raises(UsageError, match="state"):
        Sampler(SamplingOptions(), 4).restore(state)


# ---- broken input


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 17, 49_151])
@pytest.mark.parametrize("t", [0.0, 0.8])
def test_numbers_that_are_none_are_an_error(value: float, place: int, t: float) -> None:
    logits = _logits("flat", 49_152)
    logits[place] = value
    with pytest.raises(NumericError, match="49,152"):
        Sampler(SamplingOptions(temperature=t), 49_152).sample(logits)


@pytest.mark.parametrize("bias", [{-1: 1.0}, {4: 1.0}, {0: math.nan}])
def test_a_wrong_bias_is_refused(bias: dict[int, float]) -> None:
    with pytest.raises(UsageError, match="logit_bias"):
        Sampler(SamplingOptions(logit_bias=bias), 4)


def test_forbidding_everything_is_refused() -> None:
    sampler = Sampler(SamplingOptions(logit_bias=dict.fromkeys(range(4), -math.inf)), 4)
    with pytest.raises(UsageError, match="every token"):
        sampler.sample(np.zeros(4, np.float32))


def test_ignore_eos_never_ends() -> None:
    logits = np.array([0, 0, 9, 9], np.float32)
    sampler = Sampler(SamplingOptions(ignore_eos=True), 4, end_tokens=[2, 3], seed=0)
    for _ in range(50):
        token = sampler.sample(logits)
        sampler.accept(token)
        assert token in {0, 1}


_EXTREME: list[Callable[[], SamplingOptions]] = [
    lambda: SamplingOptions(temperature=1e-45),
    lambda: SamplingOptions(temperature=1e-30, top_k=0, top_p=1.0, min_p=0.0),
    lambda: SamplingOptions(temperature=100.0, top_k=2**31 - 1, top_p=0.0),
    lambda: SamplingOptions(logit_bias={2: math.inf, 3: 1e300}, temperature=0.5),
    lambda: SamplingOptions(logit_bias={2: 1e38}, repeat_penalty=0.01, repeat_last_n=-1),
    lambda: SamplingOptions(min_p=1.0, top_k=0),
    lambda: SamplingOptions(frequency_penalty=100.0, presence_penalty=-100.0),
]


@pytest.mark.parametrize("options", _EXTREME)
@pytest.mark.parametrize("scale", [1e-38, 1.0, 1e37])
def test_extreme_options_and_logits_give_a_token_and_no_warning(
    options: Callable[[], SamplingOptions], scale: float
) -> None:
    logits = np.array([0, 1, -2, 3, 0.5], np.float32) * np.float32(scale)
    sampler = Sampler(options(), 5, seed=3)
    sampler.observe([2, 3, 2])
    before = logits.copy()
    assert 0 <= sampler.sample(logits) < 5
    assert np.array_equal(before, logits)
