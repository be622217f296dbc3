"""runtime/rng.py: random numbers follow from seed and index, fit float32, and are uniform."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.runtime.rng import mixed, random_number, random_numbers, splitmix64


def test_splitmix64_matches_published_outputs():
    # First outputs of the reference generator from state 0.
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    assert splitmix64(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4


@given(st.integers(), st.integers(0, 2**31))
def test_exact_in_float32_and_below_one(seed, index):
    u = random_number(seed, index)
    assert 0.0 <= u < 1.0
    assert float(np.float32(u)) == u
    assert u == random_number(seed, index)


@given(st.lists(st.tuples(st.integers(), st.integers(-(2**31), 2**31)), min_size=1))
def test_numbers_of_arrays_are_those_of_each(pairs):
    seeds, indices = zip(*pairs, strict=True)
    drawn = random_numbers(np.array(list(map(mixed, seeds)), np.uint64), np.array(indices, np.int64))
    assert drawn.tolist() == [random_number(seed, index) for seed, index in pairs]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 12345])
def test_coarsely_uniform_along_one_stream(seed):
    numbers = [random_number(seed, i) for i in range(8000)]
    counts = np.histogram(numbers, bins=16, range=(0, 1))[0]
    # 500 expected per bin, standard deviation 22.
    assert counts.min() > 380
    assert counts.max() < 620
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.06


def test_streams_of_neighbouring_seeds_are_not_shifts_of_each_other():
    golden = 0x9E3779B97F4A7C15
    first = {random_number(5, i) for i in range(100)}
    assert len(first & {random_number(5 + golden, i) for i in range(100)}) <= 1
    assert len(first & {random_number(6, i) for i in range(100)}) <= 1
