"""tools/byte_sizes.py: sizes of memory as people write them."""

from __future__ import annotations

import pytest

from npucompile.graphs.errors import SpecError
from npucompile.tools.byte_sizes import parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2**31),
        ("512mib", 2**29),
        ("1.5 GiB", 3 * 2**29),
        ("2816MB", 2_816_000_000),
        ("2.5GB", 2_500_000_000),
        ("1000", 1000),
        ("8B", 8),
    ],
)
def test_numbers_and_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "0GiB", "-1GiB", "2G", "2 GiB GiB", "1.5", "0.3KiB", "nan", "1e9", "GiB", "2GiBs"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="is no size of memory; legal is a number of bytes above 0, or one with a unit, as in 2GiB"):
        parse_bytes(text)
