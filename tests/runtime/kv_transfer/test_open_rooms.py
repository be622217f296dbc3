"""What both sides do with the rooms of a connection."""

from __future__ import annotations

from pathlib import Path

from npucompile.runtime.kv_transfer.room import DEFAULTS
from npucompile.runtime.request import Request
from tests.support.pairs import PROMPT, Pair


def test_rooms_end_at_their_deadlines_and_with_the_connection(tiny_artifact: Path) -> None:
    pair = Pair(tiny_artifact)
    (receiver,), (sender,) = pair.receivers, pair.senders
    pair.ask(Request("first", PROMPT[:20], 6))
    pair.now_s = 10
    pair.ask(Request("second", PROMPT[:20], 6))
    for pair.now_s, left in ((DEFAULTS.asked - 1, 2), (DEFAULTS.asked, 1), (DEFAULTS.asked + 9, 1)):
        receiver.tick()
        assert receiver.rooms == left
    assert pair.results == {"first": ["timeout: a prefill server was asked"], "second": []}
    while pair.to_p:
        pair.go_on()
    # The first one was asked for and given up.
    assert sender.rooms == 1
    pair.cut()
    assert (receiver.rooms, sender.rooms) == (0, 0)
    assert pair.results["second"] == ["disconnected"]
    pair.settle()
    for engine in (pair.p, pair.d):
        engine.stepper.check()
