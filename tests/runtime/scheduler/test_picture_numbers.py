"""runtime/scheduler/picture_numbers.py: equal pictures have equal numbers, and no others have them, now or later."""

from __future__ import annotations

import pytest
from support import toy_device as toy

from npucompile.runtime.scheduler import picture_numbers
from npucompile.runtime.scheduler.picture_numbers import PictureNumbers, with_numbers

V = 13


def test_numbers_are_of_pictures_and_their_shape_and_no_tokens() -> None:
    numbers = PictureNumbers(V)
    wide, same, tall, other = toy.picture(0, 1, 3, 5), toy.picture(7, 1, 3, 5), toy.picture(0, 3, 1, 5), toy.picture(0, 1, 3, 6)
    assert numbers.of([wide, same, tall, other]) == (V, V, V + 1, V + 2)
    assert numbers.of([other, wide]) == (V + 2, V)


def test_a_number_is_never_another_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture_numbers, "MOST_PICTURES", 2)
    numbers = PictureNumbers(V)
    pictures = [toy.picture(0, 1, 1, seed) for seed in range(3)]
    assert numbers.of(pictures[:2]) == (V, V + 1)
    assert numbers.of(pictures[:1]) == (V,)
    # The second was forgotten, as it was not used as recently.
    assert numbers.of([pictures[2], pictures[0], pictures[1]]) == (V + 2, V, V + 3)


@pytest.mark.parametrize("start, count", [(0, 9), (2, 2), (4, 3), (0, 1), (8, 1), (3, 1)])
def test_they_stand_in_the_places_of_rows(start: int, count: int) -> None:
    pictures, tokens = [toy.picture(1, 1, 3, 5), toy.picture(6, 2, 1, 6)], (1, 9, 9, 9, 2, 3, 9, 9, 4)
    expected = (1, 20, 20, 20, 2, 3, 21, 21, 4)
    assert with_numbers(tokens[start : start + count], start, pictures, (20, 21)) == expected[start : start + count]
