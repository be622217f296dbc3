"""server/siblings/records.py: each door has a socket of its own, which is no file."""

from __future__ import annotations

from npucompile.server.siblings.records import Place


def test_doors_have_sockets_of_their_own_under_one_name() -> None:
    place = Place(0, 3, "server", b"key")
    assert [place.address(door) for door in range(place.doors)] == ["\0server/0", "\0server/1", "\0server/2"]
