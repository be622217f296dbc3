"""server/guard/body_room.py: large bodies share a room, and small ones need none."""

from __future__ import annotations

import contextlib

import pytest

from npucompile.graphs.errors import RequestError
from npucompile.server.guard.body_room import LARGEST, BodyRoom


def test_large_bodies_share_a_room():
    room = BodyRoom(10)
    with contextlib.ExitStack() as stack:
        for number in range(LARGEST):
            grow = stack.enter_context(room.entered(100))
            for size in (5, 10, 60, 110):
                grow(size)
            assert room.held_bytes == 100 * (number + 1)
        with room.entered(100) as grow:
            grow(10)
            with pytest.raises(RequestError) as caught:
                grow(11)
            assert caught.value.code == "queue_full"
    assert room.held_bytes == 0


def test_what_fails_gives_its_room_back():
    room = BodyRoom(0)
    with contextlib.suppress(ValueError), room.entered(100) as grow:
        grow(50)
        raise ValueError
    assert room.held_bytes == 0
