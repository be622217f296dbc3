"""Reads sizes of memory, as in `2GiB`."""

from __future__ import annotations

import re
from fractions import Fraction

from ..graphs.errors import SpecError

UNITS = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
"""Bytes of a unit, by its name in capitals."""

_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([KMGT]I?B|B)?", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Bytes of a size: a number and a unit, MiB being 2**20 bytes and MB 10**6; a number alone counts bytes.

    Raises:
        SpecError: it is none, is no whole number of bytes, or is zero.
    """
    match = _SIZE.fullmatch(text.strip())
    size = Fraction(match[1]) * UNITS[(match[2] or "").upper()] if match else Fraction(0)
    if size <= 0 or size.denominator != 1:
        raise SpecError(
            f"{text!r} is no size of memory; legal is a number of bytes above 0, or one with a unit, as in 2GiB, 512MiB or 2.5GB"
        )
    return int(size)
