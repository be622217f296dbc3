"""Counter-based random numbers: a request's seed and the index of a token give a number, whatever batch the token is sampled in."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
BITS = 24


def splitmix64(value: int) -> int:
    """The output function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a bijection of 64-bit integers."""
    value = (value + GOLDEN) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def random_number(seed: int, index: int) -> float:
    """The random number in [0, 1) that token `index` of the output of a request with this seed is sampled with.

    It has 24 bits: exact in float32, which would round some longer ones to 1. Seeds count modulo 2**64.
    """
    bits = splitmix64((mixed(seed) + index * GOLDEN) & MASK) >> (64 - BITS)
    return bits / (1 << BITS)


def mixed(seed: int) -> int:
    """Where the numbers of a seed begin: without mixing it, the streams of two seeds could be shifted copies of each other."""
    return splitmix64(seed & MASK)


def random_numbers(seeds: npt.NDArray[np.uint64], indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """`random_number` of arrays, where seeds are mixed."""
    bits = seeds + indices.astype(np.uint64) * np.uint64(GOLDEN) + np.uint64(GOLDEN)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((bits ^ (bits >> np.uint64(31))) >> np.uint64(64 - BITS)) / (1 << BITS)
