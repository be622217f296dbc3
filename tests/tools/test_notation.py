"""tools/notation.py: bucket sizes are read and written as series, against a brute-force oracle."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs.errors import SpecError
from npucompile.tools.notation import (
    BUCKETS_HELP,
    MAX_BUCKETS,
    MAX_SIZE,
    PREFILL_HELP,
    PrefillSize,
    format_buckets,
    format_prefill,
    parse_buckets,
    parse_prefill,
)

ELLIPSIS = "..."


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("2,4,…,16", [2, 4, 6, 8, 10, 12, 14, 16]),
        (" 2 , 4 , ... , 8 ", [2, 4, 6, 8]),
        # The end of a series is the first written number of the next one.
        ("2,4,...,8,16,32,...,128", [2, 4, 6, 8, 16, 32, 64, 128]),
        (f"1,2,...,{MAX_BUCKETS}", list(range(1, MAX_BUCKETS + 1))),
        (f"{MAX_SIZE}", [MAX_SIZE]),
    ],
)
def test_reads(text: str, sizes: list[int]) -> None:
    assert list(parse_buckets(text)) == sizes


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "'' is neither"),
        ("0", "'0' is neither"),
        ("-2,4", "'-2' is neither"),
        ("02", "'02' is neither"),
        ("2.0,4", "'2.0' is neither"),
        ("٢", "is neither"),
        ("9" * 5000, "is neither"),
        ("2,4,..,8", "'..' is neither"),
        ("4,2", "2 does not increase on 4"),
        ("2,4,...,4", "4 does not increase on 4"),
        ("...,8", "at least two numbers of its series, not none"),
        ("2,...,8", "at least two numbers of its series, not 2"),
        ("2,4,...,8,...,16", "at least two numbers of its series, not 8"),
        ("2,4,...", "the series has no end"),
        ("2,4,...,9", "the series 2,4,6,8 goes on with 10 and does not hit its end 9"),
        ("4,6,9,...,100", "the series 4,6,9 goes on with 27/2"),
        (f"1,2,...,{MAX_BUCKETS + 1}", "more than 512"),
        (f"1,2,...,{MAX_BUCKETS},{MAX_BUCKETS + 10}", "more than 512"),
    ],
)
def test_refuses_with_the_rule(text: str, reason: str) -> None:
    with pytest.raises(SpecError, match=re.escape(reason)) as caught:
        parse_buckets(text)
    assert repr(text) in str(caught.value)
    assert BUCKETS_HELP in str(caught.value)


def series(lead: list[int], end: int) -> list[int] | None:
    """Oracle: every number up to `end` is asked whether it belongs to the series, in whole-number arithmetic."""
    if len(lead) < 2 or end <= lead[-1]:
        return None
    b, c = lead[-2:]
    if len(lead) >= 3 and Fraction(b, lead[-3]) == Fraction(c, b):
        members = [v for v in range(c + 1, end + 1) if any(v * b**k == c * c**k for k in range(1, 12))]
        # A term that is not whole leaves a hole between neighbours.
        whole = all(y * b == x * c for x, y in pairwise([c, *members]))
        return members if whole and members[-1:] == [end] else None
    return list(range(c, end + 1, c - b))[1:] if (end - c) % (c - b) == 0 else None


def oracle(items: list[int | str]) -> list[int] | None:
    """The sizes that a list of numbers and ellipses stands for, or None when it is refused."""
    marks = [i for i, item in enumerate(items) if item == ELLIPSIS]
    if any(i + 1 >= len(items) or items[i + 1] == ELLIPSIS for i in marks) or not items:
        return None
    out: list[int] = []
    for i, item in enumerate(items):
        if isinstance(item, str):
            continue
        if i - 1 in marks:
            start = max((m for m in marks if m < i - 1), default=-1) + 1
            filled = series([x for x in items[start : i - 1] if isinstance(x, int)], item)
            if filled is None:
                return None
            out += filled
        else:
            out.append(item)
        if min(out) < 1 or any(x >= y for x, y in pairwise(out)):
            return None
    return out if len(out) <= MAX_BUCKETS else None


def outcome(text: str) -> list[int] | None:
    try:
        return list(parse_buckets(text))
    except SpecError:
        return None


small = st.integers(0, 40)


@st.composite
def likely_legal(draw: st.DrawFn) -> list[int | str]:
    """Increasing numbers with ellipses put in, biased towards steps and ratios that meet their end."""
    items: list[int | str] = [draw(st.integers(1, 6))]
    for _ in range(draw(st.integers(1, 3))):
        last = next(x for x in reversed(items) if isinstance(x, int))
        first = last + draw(st.integers(1, 5))
        step, ratio = draw(st.integers(1, 6)), draw(st.integers(2, 3))
        kind = draw(st.sampled_from(["plain", "step", "ratio"]))
        if kind == "plain":
            items.append(first)
        elif kind == "step":
            end = first + step * draw(st.integers(2, 6)) + draw(st.sampled_from([0, 0, 0, 1]))
            items += [first, first + step, ELLIPSIS, end]
        else:
            end = first * ratio ** draw(st.integers(3, 5)) + draw(st.sampled_from([0, 0, 0, 1]))
            items += [first, first * ratio, first * ratio**2, ELLIPSIS, end]
    return items


@given(likely_legal() | st.lists(small | st.just(ELLIPSIS), max_size=7))
def test_agrees_with_brute_force(items: list[int | str]) -> None:
    assert outcome(",".join(map(str, items))) == oracle(items)


@given(st.text(alphabet="0123456789,.… -+e", max_size=20))
def test_any_text_is_read_or_refused(text: str) -> None:
    sizes = outcome(text)
    if sizes is not None:
        assert sizes == sorted(set(sizes))
        assert 1 <= sizes[0] <= sizes[-1] <= MAX_SIZE
        assert len(sizes) <= MAX_BUCKETS


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ([1], "1"),
        ([2, 4, 6, 8], "2,4,6,8"),
        ([2, 4, 6, 8, 10], "2,4,...,10"),
        ([1, 2, 4, 8, 16, 32, 64], "1,2,4,...,64"),
        ([1, 2, 4, 6, 8, 10, 12], "1,2,4,6,...,12"),
        ([2, 4, 6, 8, 10, 20, 40, 80, 160, 320], "2,4,...,10,20,40,...,320"),
        ([1, 2, 4, 8, 16, 32, 33, 34, 35, 36], "1,2,4,...,32,33,...,36"),
        ([3, 7, 8, 100], "3,7,8,100"),
    ],
)
def test_writes_compactly(sizes: list[int], text: str) -> None:
    assert format_buckets(sizes) == text


@given(st.sets(st.integers(1, 60), min_size=1, max_size=30) | likely_legal().map(oracle).filter(bool))
def test_writing_then_reading_changes_nothing(sizes: set[int] | list[int]) -> None:
    ordered = sorted(sizes)
    text = format_buckets(ordered)
    assert list(parse_buckets(text)) == ordered
    assert len(text) <= len(",".join(map(str, ordered)))


@pytest.mark.parametrize("sizes", [[], [0], [2, 1], [1, 1], [-1], list(range(1, MAX_BUCKETS + 2)), [MAX_SIZE + 1]])
def test_writing_refuses_what_cannot_be_read(sizes: list[int]) -> None:
    with pytest.raises(SpecError):
        format_buckets(sizes)


def test_help_states_what_the_parser_does() -> None:
    for text, sizes in (("2,4,...,64", range(2, 65, 2)), ("1,8,16,...,64", [1, *range(8, 65, 8)]), ("2,4,8,...,64", [2, 4, 8, 16, 32, 64])):
        assert text in BUCKETS_HELP
        assert list(parse_buckets(text)) == list(sizes)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("512", [(512, 1)]),
        ("2048,4x512", [(2048, 1), (512, 4)]),
        (" 4x512 , 2048 ", [(2048, 1), (512, 4)]),
        ("32,64,...,128,8x32,2x64", [(32, 1), (64, 1), (96, 1), (128, 1), (32, 8), (64, 2)]),
    ],
)
def test_reads_prefill_sizes(text: str, sizes: list[tuple[int, int]]) -> None:
    assert list(parse_prefill(text)) == sizes


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "'' is neither"),
        ("4x", "'4x' is neither"),
        ("0x4", "'0x4' is neither"),
        ("64,32,4x8", "32 does not increase on 64"),
        ("4x8,4x8", "'4x8' is named twice"),
        ("32,4x8,64,...,128", "'...' stands behind a size of several prompts; series come first"),
    ],
)
def test_refuses_prefill_sizes(text: str, reason: str) -> None:
    with pytest.raises(SpecError, match=re.escape(reason)):
        parse_prefill(text)


@given(st.sets(st.builds(PrefillSize, st.integers(1, MAX_SIZE), st.integers(1, MAX_SIZE) | st.just(1)), min_size=1, max_size=9))
def test_prefill_sizes_are_read_back(sizes: set[PrefillSize]) -> None:
    read = parse_prefill(format_prefill(tuple(sizes)))
    assert set(read) == sizes
    assert format_prefill(read) == format_prefill(tuple(sizes))


def test_the_help_of_prefill_names_both_forms() -> None:
    assert parse_prefill(PREFILL_HELP.rpartition(" ")[2].removesuffix(".")) == (PrefillSize(512), PrefillSize(2048), PrefillSize(512, 4))
