"""What a prefill server says to whom it does not know; `test_decode_engine.py` has decode servers."""

from __future__ import annotations

import json
import logging
import struct
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from socket import SHUT_RDWR, SO_LINGER, SOL_SOCKET

import msgspec
import pytest
from support.fleet import Fleet, until
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from npucompile.runtime.kv_transfer.messages import VERSION, Ask, Computed, Failed, Hello, Ready, Renewed, decode, encode
from npucompile.runtime.request import Request
from npucompile.server.fleet.prefill_hub import PATH
from tests.support import optional


@pytest.fixture(scope="module")
def fleet(tiny_artifact: Path) -> Iterator[Fleet]:
    optional.transfer_engine()
    fleet = Fleet(tiny_artifact)
    fleet.connected()
    yield fleet
    fleet.close()


@pytest.mark.parametrize(
    ("greeting", "text"),
    [
        ("{", "none that is legal"),
        (b"\0\1", "a text of JSON"),
        ("[" * 100_000, "none that is legal"),
        ("{}", "none that is legal"),
        (encode(Ask(1, [1, 2], "", "", 0, 0)), f"a greeting of version {VERSION}"),
        (json.dumps({"type": "hello", "version": VERSION + 1, "instance": {}}), f"a greeting of version {VERSION}"),
        (json.dumps({"type": "hello", "version": VERSION, "instance": {}}), "describes itself in another way"),
    ],
)
def test_a_greeting_that_is_none_is_answered_by_what_is_wrong(fleet: Fleet, greeting: str | bytes, text: str) -> None:
    with connect(f"ws://127.0.0.1:{fleet.prefills[0].port}{PATH}") as socket:
        socket.send(greeting)
        assert text in getattr(decode(socket.recv()), "reason", "")
    until(lambda: fleet.prefills[0].hub.stats()["kv_transfer_connections"] == 1)


def test_a_message_of_wrong_types_ends_its_room_alone(fleet: Fleet) -> None:
    """It ended the server, or kept pages for ever."""
    hub, engine = fleet.prefills[0].hub, fleet.prefills[0].engine
    with connect(f"ws://127.0.0.1:{fleet.prefills[0].port}{PATH}") as socket:
        socket.send(encode(Hello(VERSION, msgspec.Raw(msgspec.json.encode(fleet.instance)), [7])))
        assert isinstance(decode(socket.recv()), Hello)
        ask, ready = Ask(1, [1, 2, 3], "", "", 0, 0), Ready(1, 0, [1], 0, 1)
        wrong = {"cache_salt": 7, "priority": None, "routed": ["x"], "tokens": [-1], "more": 1}
        for number, (name, value) in enumerate(wrong.items(), 10):
            socket.send(json.dumps({**json.loads(encode(ask)), "room": number, name: value}))
            answer = decode(socket.recv())
            assert isinstance(answer, Failed)
            assert (answer.room, name in answer.reason) == (number, True)
        for number, changed in ((1, {"pages": None}), (2, {"known": "x"}), (3, {})):
            socket.send(encode(msgspec.structs.replace(ask, room=number)))
            while not isinstance(decode(socket.recv()), Computed):
                pass
            socket.send(json.dumps({**json.loads(encode(ready)), "room": number, **changed}))
            # What is wrong with the last one is a session.
            while not isinstance(answer := decode(socket.recv()), Failed):
                socket.send(encode(Renewed(answer.at_s)))
            assert answer.room == number
        # The decode server that is connected has noticed nothing.
        assert fleet.ask(Request("beside", (5, 6, 7, 8), 2)).wait().end.reason == "length"  # type: ignore[union-attr]
        until(lambda: hub.rooms == 0)
        socket.send("nothing that has a room")
        with pytest.raises(ConnectionClosed):
            socket.recv()
    fleet.check()
    assert not engine.stats()["num_requests_running"]


def test_who_leaves_before_it_is_answered_is_no_fault(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    errors = logging.getLogger("uvicorn.error")
    errors.addHandler(caplog.handler)
    try:
        for greeting in (None, "{"):
            with connect(f"ws://127.0.0.1:{fleet.prefills[0].port}{PATH}") as socket:
                if greeting:
                    socket.send(greeting)
                # It is reset when it is closed, without a closing handshake.
                socket.socket.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
                socket.socket.shutdown(SHUT_RDWR)
        time.sleep(0.3)
    finally:
        errors.removeHandler(caplog.handler)
    # What the client itself says of its end is its own.
    assert not [record for record in caplog.records if record.exc_info and record.name != "websockets.client"]


def test_it_answers_no_requests_of_its_own(fleet: Fleet) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
    address = f"http://127.0.0.1:{fleet.prefills[0].port}/v1/completions"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(address, body, {"content-type": "application/json"}))
    assert json.loads(refused.value.read())["error"]["code"] == "prefill_role"


def test_another_server_takes_no_handovers(fleet: Fleet) -> None:
    service = fleet.prefills[0].service
    hub, service.handovers = service.handovers, None
    try:
        with pytest.raises(InvalidStatus) as refused, connect(f"ws://127.0.0.1:{fleet.prefills[0].port}{PATH}"):
            pass
    finally:
        service.handovers = hub
    assert json.loads(refused.value.response.body)["error"]["code"] == "no_prefill_role"
