"""server/siblings/records.py: each door has a socket of its own."""

from __future__ import annotations

from npucompile.server.siblings.records import Place


def test_doors_have_sockets_of_their_own_in_one_folder() -> None:
    place = Place(0, 3, "/folder", b"key")
    assert [place.address(door) for door in range(place.doors)] == ["/folder/0", "/folder/1", "/folder/2"]
