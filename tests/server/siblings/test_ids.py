"""server/siblings/ids.py: an id says which door made it, and is of the same form without doors."""

from __future__ import annotations

import pytest

from npucompile.server.siblings.ids import MOST_DOORS, door_of, new_response_id


@pytest.mark.parametrize("door", [0, 7, MOST_DOORS - 1])
def test_an_id_names_its_door(door: int) -> None:
    ids = {new_response_id(door) for _ in range(100)}
    assert len(ids) == 100
    assert {door_of(name) for name in ids} == {door}
    assert {len(name) for name in ids} == {len(new_response_id())}


@pytest.mark.parametrize("name", ["", "resp_", "resp_1", "resp_zz" + "0" * 30, "RESP_00" + "0" * 30, "resp_00" + "0" * 31, "chatcmpl-1"])
def test_what_is_no_id_names_none(name: str) -> None:
    assert door_of(name) is None
