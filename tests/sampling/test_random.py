"""The counter-based generator against NumPy's own Philox."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edgellama.sampling import random

_U64 = st.integers(0, 2**64 - 1)


@given(key=st.integers(0, 2**128 - 1), counter=st.integers(0, 2**256 - 2))
def test_blocks_equal_numpys_philox(key: int, counter: int) -> None:
    theirs = np.random.Philox(key=key, counter=counter).random_raw(4)
    assert random.philox(key, counter + 1) == tuple(int(x) for x in theirs)


@given(seed=_U64, index=st.integers(0, 2**40))
def test_uniform_is_the_first_number_of_numpys_generator(seed: int, index: int) -> None:
    assert random.uniform(seed, index) == np.random.Generator(np.random.Philox(key=seed, counter=index)).random()


def test_draws_are_uniform_over_indices_and_seeds() -> None:
    for numbers in (
        [random.uniform(7, i) for i in range(20_000)],
        [random.uniform(seed, 3) for seed in range(20_000)],
    ):
        counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
        chi_square = ((counts - 400) ** 2 / 400).sum()
        assert chi_square < 95  # 49 degrees of freedom, p = 1e-4
