"""Random numbers of a request: each depends on the request's seed and the index of the token alone."""

from __future__ import annotations

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
    """The uniform number in [0, 1) that picks generated token `index` of a request with this seed.

    It has 24 bits, so it is exact in float32 and never rounds to 1. Seeds that agree modulo 2**64 are the same seed.
    """
    # Mix the seed first; otherwise the streams of two seeds would be shifted copies of each other.
    bits = splitmix64((splitmix64(seed & MASK) + index * GOLDEN) & MASK) >> (64 - BITS)
    return bits / (1 << BITS)
