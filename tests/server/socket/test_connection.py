"""server/socket/connection.py: the state of one socket against a model of it, and that no input breaks it."""

from __future__ import annotations

import json
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from npucompile.graphs.errors import ProtocolError, RequestError
from npucompile.server.requests.create_body import read_create
from npucompile.server.requests.frames import JSON, MSGPACK, encode
from npucompile.server.socket.connection import Connection, CreateCommand, new_response_id
from npucompile.server.socket.messages import ResponseCancel, ResponseResume


def connection(**options):
    numbers = count()
    return Connection(new_id=lambda: f"resp_{next(numbers)}", **options)


def create(**fields):
    return json.dumps({"type": "response.create", "input": "x", **fields})


def cancel(**fields):
    return json.dumps({"type": "response.cancel", **fields})


def resume(response_id, **fields):
    return json.dumps({"type": "response.resume", "response_id": response_id, **fields})


def refused(conn, frame):
    before = conn.open
    with pytest.raises((ProtocolError, RequestError)) as caught:
        conn.receive(frame)
    assert conn.open == before
    return caught.value


def test_a_lane_that_is_free_can_be_resumed_in():
    conn = connection()
    assert conn.receive(resume("resp_7", starting_after=3)) == ResponseResume(response_id="resp_7", starting_after=3)
    assert conn.receive(create()) is None
    assert refused(conn, resume("resp_8")).code == "stream_in_use"
    assert refused(conn, resume("resp_7", stream_id="b")).code == "stream_in_use"
    assert conn.receive(cancel(response_id="resp_7")) == ResponseCancel(response_id="resp_7")
    assert conn.finish("resp_7").response_id == "resp_0"


def test_cancel_finds_by_response_by_stream_and_by_both():
    conn = connection()
    conn.receive(create(stream_id="a"))
    conn.receive(create(stream_id="b"))
    for fields in ({"response_id": "resp_1"}, {"stream_id": "b"}, {"response_id": "resp_1", "stream_id": "b"}):
        assert conn.receive(cancel(**fields)) == ResponseCancel(response_id="resp_1", stream_id="b")
    assert conn.open == {"a": "resp_0", "b": "resp_1"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_id": "resp_9"}, "response_id"),
        ({"stream_id": "z"}, "stream_id"),
        ({"response_id": "resp_0", "stream_id": "b"}, "response_id"),
    ],
)
def test_cancel_of_what_is_not_open_is_refused(fields, param):
    conn = connection()
    conn.receive(create(stream_id="a"))
    conn.receive(create(stream_id="b"))
    error = refused(conn, cancel(**fields))
    assert (error.code, error.param) == ("response_not_found", param)
    assert error.values["open"] == "['a', 'b']"


def test_too_many_streams_are_refused_and_named_shortly():
    conn = connection(max_streams=20)
    for number in range(18):
        conn.receive(create(stream_id=str(number)))
    assert [conn.receive(create(stream_id="7")) for _ in range(2)] == [None, None]
    error = refused(conn, create(stream_id="new"))
    assert (error.code, error.values) == ("too_many_streams", {"count": 20, "most": 20})
    assert refused(conn, cancel(stream_id="z")).values["open"].endswith("and 10 more")
    conn.finish("resp_7")
    assert conn.receive(create(stream_id="new")).stream_id == "new"


def test_the_frame_limit_is_kept():
    conn = connection(max_frame_bytes=100)
    assert refused(conn, create(model="x" * 100)).code == "frame_too_large"
    conn.receive(create())


def test_response_ids_are_new():
    ids = {new_response_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(name.startswith("resp_") for name in ids)


@given(st.lists(st.binary(max_size=40) | st.text(max_size=40), max_size=10), st.sampled_from([JSON, MSGPACK]))
def test_garbage_never_costs_the_connection(frames, subprotocol):
    conn = connection(subprotocol=subprotocol)
    good = {"type": "response.create", "input": "x", "stream_id": "a"}
    assert isinstance(conn.receive(encode(good, subprotocol)), CreateCommand)
    for frame in frames:
        refused(conn, frame)
    assert conn.receive(encode({"type": "response.cancel", "stream_id": "a"}, subprotocol)) == ResponseCancel(
        response_id="resp_0", stream_id="a"
    )
    conn.finish("resp_0")
    assert isinstance(conn.receive(encode(good, subprotocol)), CreateCommand)


NAMES = st.sampled_from(["a", "b", "0", "1"])


GARBAGE = ["", "[]", "{}", b"\xff", '{"type":"response.create"}', create(top_k=-2, stream_id="a")]


class Streams(RuleBasedStateMachine):
    """Any order of creates, cancels, ends and garbage, beside lists."""

    def __init__(self):
        super().__init__()
        self.conn = connection(max_streams=3)
        self.lanes: dict[str, list[str]] = {}
        self.frames: dict[str, dict[str, str]] = {}
        self.created = 0

    @rule(name=st.none() | NAMES)
    def create(self, name):
        fields = {"model": f"m{self.created}"} | ({} if name is None else {"stream_id": name})
        self.frames[f"resp_{self.created}"], frame = fields, create(**fields)
        if sum(map(len, self.lanes.values())) == 3:
            assert refused(self.conn, frame).code == "too_many_streams"
            return
        command = self.conn.receive(frame)
        lane = self.lanes.setdefault(name or "", [])
        lane.append(f"resp_{self.created}")
        self.created += 1
        assert (command and (command.response_id, command.stream_id)) == ((lane[0], name or "") if len(lane) == 1 else None)

    @rule(name=NAMES)
    def cancel(self, name):
        if name in self.lanes:
            assert self.conn.receive(cancel(stream_id=name)) == ResponseCancel(response_id=self.lanes[name][0], stream_id=name or None)
        else:
            assert refused(self.conn, cancel(stream_id=name)).code == "response_not_found"

    @rule(number=st.integers(0, 8))
    def finish(self, number):
        following = self.conn.finish(f"resp_{number}")
        lane = next((name for name, ids in self.lanes.items() if ids[0] == f"resp_{number}"), None)
        expected = self.lanes[lane][1:2] if lane is not None else []
        assert ([following.response_id] if following else []) == expected
        if following:
            assert following.body == read_create({"input": "x", **self.frames[following.response_id]})
        if lane is not None:
            self.lanes[lane].pop(0)
            self.lanes = {name: ids for name, ids in self.lanes.items() if ids}

    @rule(frame=st.sampled_from(GARBAGE))
    def garbage(self, frame):
        refused(self.conn, frame)

    @invariant()
    def same(self):
        assert self.conn.open == {name: ids[0] for name, ids in self.lanes.items()}


Streams.TestCase.settings = settings(max_examples=40, stateful_step_count=25)
TestStreams = Streams.TestCase
