"""Positions of prompts with pictures, against transformers and against counted ones."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import towers

from npucompile.graphs.errors import RequestError
from npucompile.runtime.picture_spans import Grid, Span, position_offset, positions, spans

PICTURE, VIDEO, START, END = (towers.IDS[f"{name}_token_id"] for name in ("image", "video", "vision_start", "vision_end"))


def prompt(parts: list[int | tuple[int, Grid]]) -> tuple[list[int], dict[int, list[Grid]]]:
    """Tokens of numbers of text tokens and of pictures and videos; text stands before each pair of frames, as timestamps do."""
    tokens, grids = [], {PICTURE: [], VIDEO: []}
    for part in parts:
        if isinstance(part, int):
            tokens += [5] * part
            continue
        mark, (t, h, w) = part
        grids[mark].append((t, h, w))
        for _ in range(t):
            tokens += [*([8] if mark == VIDEO else []), START, *[mark] * (h * w // 4), END]
    return tokens, grids


def of_transformers(tokens: list[int], grids: dict[int, list[Grid]]) -> tuple[torch.Tensor, int]:
    types = torch.tensor([[1 if token == PICTURE else 2 if token == VIDEO else 0 for token in tokens]])
    given = {mark: torch.tensor(each) if each else None for mark, each in grids.items()}
    model = towers.model("small patches").model
    found, delta = model.get_rope_index(torch.tensor([tokens]), types, image_grid_thw=given[PICTURE], video_grid_thw=given[VIDEO])
    return found[:, 0].T, int(delta)


def check(tokens: list[int], grids: dict[int, list[Grid]]) -> None:
    found = spans(tokens, grids, 2)
    wanted, delta = of_transformers(tokens, grids)
    made = positions(len(tokens), found)
    assert made.dtype == np.int32
    assert made.tolist() == wanted.tolist()
    assert position_offset(found) == delta <= 0


EVEN = st.integers(1, 6).map(lambda n: 2 * n)
PICTURES = st.tuples(st.just(PICTURE), st.tuples(st.just(1), EVEN, EVEN))
VIDEOS = st.tuples(st.just(VIDEO), st.tuples(st.integers(1, 3), EVEN, EVEN))


@given(st.lists(st.one_of(st.integers(1, 9), PICTURES, VIDEOS), min_size=1, max_size=7))
@settings(max_examples=300)
def test_any_prompt_has_the_positions_of_transformers(parts: list[int | tuple[int, Grid]]) -> None:
    check(*prompt(parts))


@pytest.mark.parametrize(
    "parts",
    [
        [4],
        [3, (PICTURE, (1, 8, 6)), 3],
        [(PICTURE, (1, 2, 14))],
        [2, (PICTURE, (1, 8, 2)), 4, (PICTURE, (1, 2, 14)), (PICTURE, (1, 6, 6)), 1],
        [1, (VIDEO, (3, 4, 6)), 2],
        [(VIDEO, (2, 4, 4)), 1, (PICTURE, (1, 4, 6)), 1],
    ],
)
def test_prompts_have_the_positions_of_transformers(parts: list[int | tuple[int, Grid]]) -> None:
    check(*prompt(parts))


def test_a_picture_between_text_is_where_it_was_counted() -> None:
    tokens = [7, 8, 9, START, *[PICTURE] * 12, END, 10, 11, 12]
    (span,) = found = spans(tokens, {PICTURE: [(1, 8, 6)]}, 2)
    assert (span, span.end) == (Span(4, 4, 3), 16)
    time, rows, columns = positions(20, found).T.tolist()
    assert time == [0, 1, 2, 3, *[4] * 12, 8, 9, 10, 11]
    assert rows[4:16] == [4, 4, 4, 5, 5, 5, 6, 6, 6, 7, 7, 7]
    assert columns[4:16] == [4, 5, 6] * 4
    assert position_offset(found) == -8


def test_pictures_without_text_between_are_two() -> None:
    assert spans([PICTURE] * 5, {PICTURE: [(1, 2, 2), (1, 4, 4)]}, 2) == (Span(0, 1, 1), Span(1, 2, 2))


def test_positions_of_a_prefix_do_not_depend_on_what_follows() -> None:
    tokens, grids = prompt([2, (PICTURE, (1, 4, 6)), 3, (PICTURE, (1, 8, 4)), 2])
    found = spans(tokens, grids, 2)
    whole = positions(len(tokens), found)
    for count, known in itertools.product(range(1, len(tokens) + 1), (0, 1, 2)):
        if all(span.first >= count for span in found[known:]) and all(span.end <= count for span in found[:known]):
            assert (positions(count, found[:known]) == whole[:count]).all()


@pytest.mark.parametrize(
    ("tokens", "grids", "message"),
    [
        ([1, PICTURE], [], f"has 1 placeholders {PICTURE}, and placeholder 1 is of no picture"),
        ([PICTURE] * 3, [(1, 4, 4)], f"has 3 placeholders {PICTURE}, and the picture at 0 takes 4 in a row"),
        ([PICTURE, 1, PICTURE], [(1, 4, 2)], "has 2 placeholders 90, and the picture at 0 takes 2 in a row"),
        ([PICTURE] * 5, [(1, 4, 4)], "has 5 placeholders 90, and placeholder 4 is of no picture"),
        ([1, 2], [(1, 2, 2), (1, 2, 2)], "has 0 placeholders 90, and 2 pictures have no places"),
    ],
)
def test_more_or_fewer_placeholders_than_pictures_are_refused(tokens: list[int], grids: list[Grid], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        spans(tokens, {PICTURE: grids}, 2)


def test_a_long_prompt_takes_no_time_a_token() -> None:
    tokens, grids = prompt([1000, (PICTURE, (1, 256, 256)), 1000, *[(PICTURE, (1, 4, 4))] * 50, 7])
    check(tokens, grids)
