"""Requests of a decode server whose handover does not go through at once; `test_sender.py` has all orders of events."""

from __future__ import annotations

from pathlib import Path

import pytest

from npucompile.runtime.kv_transfer.lease import LEASE_S
from npucompile.runtime.kv_transfer.room import RoomStage
from tests.support.pairs import check, crowded


def test_requests_that_lose_their_pages_are_asked_for_again(tiny_artifact: Path) -> None:
    pair = crowded(tiny_artifact)
    check(pair, tiny_artifact)
    assert next(pair.numbers) > 7
    assert pair.landed.computed_here == 0


@pytest.mark.parametrize("writing", [False, True])
def test_a_second_handover_that_fails_ends_in_computing_here(tiny_artifact: Path, writing: bool) -> None:
    """Before anything is written, and while pages are, which are used again when nobody can write to them."""
    pair, began = crowded(tiny_artifact), 0.0
    while not any(handover.again for handover in pair.receivers[0]._handovers.values()):
        assert pair.go_on()
    if writing:
        while not any(h.again and h.room.stage is RoomStage.RECEIVING for h in pair.receivers[0]._handovers.values()):
            assert pair.go_on()
        began = pair.now_s
    pair.cut()
    check(pair, tiny_artifact, "disconnected")
    assert pair.landed.computed_here > 0
    assert pair.now_s - began >= (LEASE_S if writing else 0)
    assert pair.access.revoked == writing


def test_a_client_that_leaves_during_a_second_handover_is_told_once(tiny_artifact: Path) -> None:
    pair = crowded(tiny_artifact)
    (receiver,) = pair.receivers
    while not (again := [h for h in receiver._handovers.values() if h.again and h.room.stage is RoomStage.RECEIVING]):
        assert pair.go_on()
    pair.cut()
    assert again[0].room.stage is RoomStage.REVOKING
    pair.cancel(again[0].request_id)
    pair.cancel(again[0].request_id)
    pair.settle()
    assert [event for event in pair.results[again[0].request_id] if isinstance(event, str)] == ["cancelled"]
    assert pair.results[again[0].request_id][-1] == "cancelled"
    pair.d.stepper.check()
    assert pair.d.stats()["num_requests_running"] == pair.d.stats()["num_requests_waiting"] == 0
