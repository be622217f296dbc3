"""Rooms of a body are given out in turn."""

from __future__ import annotations

from npucompile.server.engine.choice import RouterChoice, chosen


def test_rooms_are_given_out_in_turn_and_nobody_has_chosen_by_default() -> None:
    choice = RouterChoice("place", [5, 6], "bootstrap_host")
    assert [choice.take() for _ in range(3)] == [5, 6, 5]
    assert chosen.get() is None
