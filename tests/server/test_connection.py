"""server/connection.py: the state of one socket against a model of it, and that no input breaks it."""

from __future__ import annotations

import json
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from npucompile.graphs.errors import ProtocolError
from npucompile.server.connection import CancelCommand, Connection, CreateCommand, new_response_id
from npucompile.server.create_body import ResponseCreate
from npucompile.server.frames import JSON, MSGPACK, encode


def connection(**options):
    numbers = count()
    return Connection(new_id=lambda: f"resp_{next(numbers)}", **options)


def create(**fields):
    return json.dumps({"type": "response.create", "input": "x", **fields})


def cancel(**fields):
    return json.dumps({"type": "response.cancel", **fields})


def refused(conn, frame):
    before = conn.open
    with pytest.raises(ProtocolError) as caught:
        conn.receive(frame)
    assert conn.open == before
    return caught.value


def test_streams_without_a_name_get_the_smallest_free_number():
    conn = connection()
    assert [conn.receive(create()).stream_id for _ in range(3)] == ["0", "1", "2"]
    conn.finish("resp_1")
    assert conn.receive(create(stream_id="3")).stream_id == "3"
    assert [conn.receive(create()).stream_id for _ in range(2)] == ["1", "4"]


def test_a_stream_in_use_is_refused_and_free_again_after_its_end():
    conn = connection()
    assert conn.receive(create(stream_id="a")) == CreateCommand("resp_0", "a", ResponseCreate("x", stream_id="a"))
    error = refused(conn, create(stream_id="a"))
    assert (error.code, error.param, error.stream_id) == ("stream_in_use", "stream_id", "a")
    assert "'a'" in str(error)
    assert "'resp_0'" in str(error)
    conn.finish("resp_0")
    assert conn.receive(create(stream_id="a")).response_id == "resp_1"


def test_cancel_finds_by_response_by_stream_and_by_both():
    conn = connection()
    conn.receive(create(stream_id="a"))
    conn.receive(create(stream_id="b"))
    for fields in ({"response_id": "resp_1"}, {"stream_id": "b"}, {"response_id": "resp_1", "stream_id": "b"}):
        assert conn.receive(cancel(**fields)) == CancelCommand("resp_1", "b")
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
    assert "['a', 'b']" in str(error)


def test_a_finished_response_cannot_be_cancelled():
    conn = connection()
    conn.receive(create())
    conn.finish("resp_0")
    conn.finish("resp_0")
    assert refused(conn, cancel(response_id="resp_0")).code == "response_not_found"


def test_too_many_streams_are_refused_and_named_shortly():
    conn = connection(max_streams=20)
    for _ in range(20):
        conn.receive(create())
    error = refused(conn, create(stream_id="new"))
    assert error.code == "too_many_streams"
    assert "20" in str(error)
    assert "and 12 more" in str(refused(conn, cancel(stream_id="z")))
    conn.finish("resp_7")
    assert conn.receive(create()).stream_id == "7"


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
    assert conn.receive(encode({"type": "response.cancel", "stream_id": "a"}, subprotocol)) == CancelCommand("resp_0", "a")
    conn.finish("resp_0")
    assert isinstance(conn.receive(encode(good, subprotocol)), CreateCommand)


NAMES = st.sampled_from(["a", "b", "0", "1"])


GARBAGE = ["", "[]", "{}", b"\xff", '{"type":"response.create"}', create(top_k=-1, stream_id="a")]


class Streams(RuleBasedStateMachine):
    """Any order of creates, cancels, ends and garbage, beside a dict."""

    def __init__(self):
        super().__init__()
        self.conn = connection(max_streams=3)
        self.model: dict[str, str] = {}
        self.created = 0

    @rule(name=st.none() | NAMES)
    def create(self, name):
        frame = create(**({} if name is None else {"stream_id": name}))
        if name in self.model:
            assert refused(self.conn, frame).code == "stream_in_use"
        elif len(self.model) == 3:
            assert refused(self.conn, frame).code == "too_many_streams"
        else:
            command = self.conn.receive(frame)
            assert command.response_id == f"resp_{self.created}"
            assert command.stream_id not in self.model
            assert name in (None, command.stream_id)
            self.model[command.stream_id] = command.response_id
            self.created += 1

    @rule(name=NAMES)
    def cancel(self, name):
        if name in self.model:
            assert self.conn.receive(cancel(stream_id=name)) == CancelCommand(self.model[name], name)
        else:
            assert refused(self.conn, cancel(stream_id=name)).code == "response_not_found"

    @rule(number=st.integers(0, 8))
    def finish(self, number):
        self.conn.finish(f"resp_{number}")
        self.model = {name: response for name, response in self.model.items() if response != f"resp_{number}"}

    @rule(frame=st.sampled_from(GARBAGE))
    def garbage(self, frame):
        refused(self.conn, frame)

    @invariant()
    def same(self):
        assert self.conn.open == self.model


Streams.TestCase.settings = settings(max_examples=40, stateful_step_count=25)
TestStreams = Streams.TestCase
