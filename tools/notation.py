"""Parses and formats lists of bucket sizes, as in `2,4,...,64`, prefill sizes, as in `2048,4x512`, and encode sizes, as in `256x4`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import islice
from typing import NamedTuple

from ..graphs.errors import SpecError

MAX_BUCKETS = 512
MAX_SIZE = 999_999_999

BUCKETS_HELP = f"""\
Bucket sizes, increasing: numbers separated by commas, where '...' fills in a series up to exactly the number after it.
The numbers written before '...' decide: the last two give the step (2,4,...,64 is 2,4,6 up to 64; 1,8,16,...,64 steps by 8),
unless the last three are in constant ratio (2,4,8,...,64 multiplies by 2). A number that ends one series may begin the next:
1,2,4,...,16,32 is 1,2,4,8,16,32. Sizes are whole numbers from 1 to {MAX_SIZE}, at most {MAX_BUCKETS} of them."""

PREFILL_HELP = """\
Prefill sizes: tokens of one prompt, in the same notation, and PROMPTSxTOKENS for steps of several prompts: 512,2048,4x512."""

_ELLIPSES = ("...", "…")
_SIZE = re.compile(r"[1-9][0-9]{0,8}")
_SHARED = re.compile(r"([1-9][0-9]{0,8})x([1-9][0-9]{0,8})")
# An ellipsis for fewer numbers would be longer than the numbers.
_FEWEST_ABBREVIATED = 3


def parse_buckets(text: str) -> tuple[int, ...]:
    """Reads a bucket list.

    The rule, where "written" numbers are those between the previous ellipsis and this one, the end of the previous series included:

    - an ellipsis follows at least two written numbers and is followed by the number its series ends with, which must be hit exactly;
    - when the last three written numbers are in constant ratio the series is geometric: `2,4,8,...,64`, `8,12,18,...,27`;
    - else the last two give its step: `2,4,...,64`, and also `1,4,6,...,16` (1,4,6,8,...), where the first number stands apart.
      So `1,2,4,...` doubles; steps of two after a one are `1,2,4,6,...`.

    Args:
        text: the notation; spaces around numbers and the one-character ellipsis are accepted.

    Returns:
        strictly increasing sizes from 1 to MAX_SIZE, at least one and at most MAX_BUCKETS.

    Raises:
        SpecError: on anything else, with the reason and the rule.
    """
    sizes: list[int] = []
    written: list[int] = []  # since the previous ellipsis, the end of its series included
    open_series = False
    for item in (piece.strip() for piece in text.split(",")):
        if item in _ELLIPSES:
            if open_series or len(written) < 2:
                before = ",".join(map(str, written)) or "none"
                raise _refusal(text, f"{item!r} must follow at least two numbers of its series, not {before}")
            open_series = True
            continue
        if not _SIZE.fullmatch(item):
            raise _refusal(text, f"{item!r} is neither '...' nor a whole number from 1 to {MAX_SIZE}")
        size = int(item)
        if sizes and size <= sizes[-1]:
            raise _refusal(text, f"{size} does not increase on {sizes[-1]}")
        if open_series:
            sizes += _fill(text, written, size)
            written, open_series = [size], False
        else:
            sizes.append(size)
            written.append(size)
        if len(sizes) > MAX_BUCKETS:
            raise _refusal(text, f"it names more than {MAX_BUCKETS} sizes")
    if open_series:
        raise _refusal(text, "the series has no end: a number must follow the last '...'")
    return tuple(sizes)


class PrefillSize(NamedTuple):
    """The size of a prefill step: at most so many tokens of each prompt, and so many prompts (of one dp group)."""

    tokens: int
    prompts: int = 1

    def __str__(self) -> str:
        return str(self.tokens) if self.prompts == 1 else f"{self.prompts}x{self.tokens}"


def parse_prefill(text: str) -> tuple[PrefillSize, ...]:
    """Reads prefill sizes: those of one prompt as `parse_buckets` does, and anywhere after their series any number of PROMPTSxTOKENS.

    Returns:
        in the order in which they are written, each once.

    Raises:
        SpecError: on anything else, with the reason and the rule.
    """
    items = [piece.strip() for piece in text.split(",")]
    shared = {i: match for i, item in enumerate(items) if (match := _SHARED.fullmatch(item))}
    if any(item in _ELLIPSES for item in items[min(shared, default=len(items)) :]):
        raise _refusal(text, "'...' stands behind a size of several prompts; series come first", PREFILL_HELP)
    plain = [item for i, item in enumerate(items) if i not in shared]
    sizes = {size: None for size in map(PrefillSize, parse_buckets(",".join(plain)))} if plain else {}
    for match in shared.values():
        size = PrefillSize(int(match[2]), int(match[1]))
        if size in sizes:
            raise _refusal(text, f"{match[0]!r} is named twice", PREFILL_HELP)
        sizes[size] = None
    return tuple(sizes)


def format_prefill(sizes: Sequence[PrefillSize]) -> str:
    """Formats prefill sizes: those of one prompt first; parse_prefill reads them back, in that order."""
    return ",".join(map(str, sorted(sizes, key=lambda size: (size.prompts > 1, size))))


class EncodeSize(NamedTuple):
    """The size of an encode step: at most so many patches of each segment, and so many segments (of one dp group)."""

    patches: int
    segments: int = 1

    def __str__(self) -> str:
        return str(self.patches) if self.segments == 1 else f"{self.patches}x{self.segments}"


NO_PICTURES = "none"


def parse_encode(text: str) -> tuple[EncodeSize, ...]:
    """Reads encode sizes: patches of one segment as `parse_buckets` does, and anywhere after their series any number of PATCHESxSEGMENTS;
    `none` is no sizes.

    Returns:
        in the order in which they are written, each once.

    Raises:
        SpecError: on anything else, with the rule.
    """
    if text.strip() == NO_PICTURES:
        return ()
    turned = ",".join("x".join(reversed(item.strip().split("x"))) for item in text.split(","))
    try:
        return tuple(EncodeSize(*size) for size in parse_prefill(turned))
    except SpecError:
        raise SpecError(
            f"sizes {text!r}: legal are patches of a segment, in the notation of bucket sizes, behind them any number of PATCHESxSEGMENTS, "
            f"each once, as in 1024,4096,256x4; or {NO_PICTURES}"
        ) from None


def format_encode(sizes: Sequence[EncodeSize]) -> str:
    """Formats encode sizes: those of one segment first; parse_encode reads them back, in that order."""
    return ",".join(map(str, sorted(sizes, key=lambda size: (size.segments > 1, size)))) or NO_PICTURES


DEFAULT_ENCODE = (EncodeSize(256), EncodeSize(1024), EncodeSize(4096))
"""Patches of the smallest picture of published processors, and of pictures of 512x512 and 1024x1024 pixels."""

PUBLISHED_ENCODE = format_encode(DEFAULT_ENCODE)
"""For launches that take pictures and say no sizes, as published ones do."""


def format_buckets(sizes: Sequence[int]) -> str:
    """Formats bucket sizes, abbreviating every series in which that leaves out two numbers or more.

    Args:
        sizes: as parse_buckets returns them; parse_buckets reads the result back to the same sizes.

    Raises:
        SpecError: the sizes cannot be written (none, not increasing, out of range, too many).
    """
    items: list[str] = []
    written: list[int] = []
    at = 0
    while at < len(sizes):
        predicted = _continuation(written) if len(written) >= 2 else iter(())
        run = 0
        for guess, size in zip(predicted, sizes[at:], strict=False):
            if guess != size:
                break
            run += 1
        if run >= _FEWEST_ABBREVIATED:
            at += run
            written = [sizes[at - 1]]
            items += ["...", str(sizes[at - 1])]
        else:
            written.append(sizes[at])
            items.append(str(sizes[at]))
            at += 1
    text = ",".join(items)
    if parse_buckets(text) != tuple(sizes):
        raise _refusal(text, f"it does not stand for {tuple(sizes)!r}")
    return text


def _continuation(written: Sequence[int]) -> Iterator[Fraction]:
    """The numbers that an ellipsis after `written` stands for, without end; the terms of a geometric series may be fractions."""
    before, last = written[-2:]
    geometric = len(written) >= 3 and before * before == written[-3] * last
    term = Fraction(last)
    while True:
        term = term * last / before if geometric else term + (last - before)
        yield term


def _fill(text: str, written: Sequence[int], end: int) -> list[int]:
    """The numbers after `written` up to `end`, which the series must hit."""
    filled: list[int] = []
    for term in islice(_continuation(written), MAX_BUCKETS):
        if term > end or term.denominator != 1:
            reached = ",".join(map(str, (*written, *filled[-2:])))
            raise _refusal(text, f"the series {reached} goes on with {term} and does not hit its end {end}")
        filled.append(int(term))
        if term == end:
            return filled
    raise _refusal(text, f"it names more than {MAX_BUCKETS} sizes")


def _refusal(text: str, reason: str, rule: str = BUCKETS_HELP) -> SpecError:
    return SpecError(f"buckets {text!r}: {reason}.\n{rule}")
