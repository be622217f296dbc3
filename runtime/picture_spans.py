"""Where pictures stand in a prompt, and the positions on three axes that its tokens have then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..graphs.errors import RequestError

Grid = tuple[int, int, int]
"""Patches of a picture or a video in time, rows and columns."""


@dataclass(frozen=True)
class Span:
    """Tokens of a prompt in whose places the rows of a picture, or of a pair of frames of a video, stand.

    Attributes:
        first: index of the first of them.
        rows, columns: of merged patches, each of which is a token.
    """

    first: int
    rows: int
    columns: int

    @property
    def end(self) -> int:
        """Index of the token behind the last."""
        return self.first + self.rows * self.columns


@dataclass(frozen=True, eq=False)
class PictureInput:
    """A segment of what a vision tower encodes for a prompt: a picture, or a pair of frames of a video.

    Attributes:
        span: the places of its rows in the prompt.
        patches: [N, C T P P] u8, a row a patch, by channel, frame, row and column in it, in the order of `server/pictures/processor.py`.
            A picture has the same in all T frames, and may have [N, C P P] instead.
        grid: rows and columns of patches; N is their product.
        digest: of the patches, their shape and what made them: rows of equal digests are equal.
    """

    span: Span
    patches: npt.NDArray[np.uint8]
    grid: tuple[int, int]
    digest: bytes


class Places(NamedTuple):
    """Where the tokens of a chunk stand whose prompt has pictures.

    Attributes:
        positions: [tokens, 3] in time, row and column.
        picture_rows: [tokens + 1] rows of the pool in the places of the tokens and of the one behind them; 0 is none.
    """

    positions: npt.NDArray[np.int32]
    picture_rows: Sequence[int]


def spans(tokens: Sequence[int], grids: Mapping[int, Iterable[Grid]], merge: int) -> tuple[Span, ...]:
    """The spans of a prompt, in order.

    Args:
        tokens: of the whole prompt. That no other text than a picture's has its placeholders is for the caller to see to.
        grids: placeholder -> what stands for it, in order: of pictures, and of videos, each frame pair of which is a span of its own.
        merge: patches of a token are a square of this side, and divide the rows and columns of every grid.

    Raises:
        RequestError: there are more or fewer placeholders than the grids have tokens.
    """
    ids = np.asarray(tokens)
    left = {mark: iter([(h // merge, w // merge) for t, h, w in given for _ in range(t)]) for mark, given in grids.items()}
    found: list[Span] = []
    end = 0
    for at in np.flatnonzero(np.isin(ids, list(grids))).tolist():
        if at < end:
            continue
        mark = int(ids[at])
        if (grid := next(left[mark], None)) is None:
            raise _unequal(ids, mark, f"placeholder {at} is of no picture")
        span = Span(at, *grid)
        if not (ids[at : (end := span.end)] == mark).all() or end > len(ids):
            raise _unequal(ids, mark, f"the picture at {at} takes {end - at} in a row")
        found.append(span)
    for mark, rest in left.items():
        if (missing := sum(1 for _ in rest)) > 0:
            raise _unequal(ids, mark, f"{missing} pictures have no places")
    return tuple(found)


def _unequal(ids: npt.NDArray[np.int64], mark: int, what: str) -> RequestError:
    count = int((ids == mark).sum())
    return RequestError(f"the prompt has {count} placeholders {mark}, and {what}; legal is one for each row of each picture")


def positions(count: int, spans: Sequence[Span]) -> npt.NDArray[np.int32]:
    """Positions of a prompt's tokens, as `get_rope_index` of transformers 5.23 gives them.

    A text token is one further than what is before it, on every axis. A picture stands at one time; its tokens are as far behind that as
    their rows and columns; what follows is as far behind as its longer side.

    Args:
        count: tokens of the prompt.

    Returns:
        [count, 3] i32: time, row, column.
    """
    steps = np.ones(count, np.int64)
    for span in spans:
        steps[span.first : span.end] = 0
        steps[span.end - 1] = max(span.rows, span.columns)
    # Where a token would be if it were text: behind all before it.
    places = np.repeat((np.cumsum(steps) - steps)[:, None], 3, 1)
    for span in spans:
        row, column = np.divmod(np.arange(span.rows * span.columns), span.columns)
        places[span.first : span.end] = places[span.first] + np.stack([np.zeros_like(row), row, column], 1)
    return places.astype(np.int32)


def position_offset(spans: Iterable[Span]) -> int:
    """What is added to the index of a token behind these spans to give its position on every axis; never above 0."""
    return sum(max(span.rows, span.columns) - span.rows * span.columns for span in spans)
