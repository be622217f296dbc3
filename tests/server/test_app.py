"""server/app.py: the whole server over real sockets: uvicorn on a loopback port, with an engine that repeats the prompt."""

from __future__ import annotations

import contextlib
import json

import msgpack
import pytest
from support.scripted import ScriptedEngine
from support.texts import byte_codec
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from npucompile.server.engine.service import ServedModel, Service
from npucompile.server.guard.limits import SocketLimits
from npucompile.server.requests.frames import JSON, MSGPACK
from npucompile.server.run import serving

MODEL = ServedModel("tiny", max_model_len=128, vocab_size=256)
LIMITS = SocketLimits(max_frame_bytes=4096)
TIMEOUT_S = 60


def echo(prompt):
    """Repeats the prompt; one that begins with "?" is said once, and then waits to be cancelled."""
    return f"{prompt}\u2026" if prompt.startswith("?") else prompt * 128


@pytest.fixture(scope="module")
def engine():
    with contextlib.closing(ScriptedEngine(echo)) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine):
    with serving(Service(engine, byte_codec(), MODEL), limits=LIMITS) as url:
        yield url


class Socket:
    """A socket of the `websockets` library that speaks either subprotocol."""

    def __init__(self, raw):
        self.raw = raw
        self.packed = raw.subprotocol == MSGPACK

    def send(self, **event):
        self.raw.send(msgpack.packb(event) if self.packed else json.dumps(event))

    def receive(self, kind=None):
        while True:
            frame = self.raw.recv(timeout=TIMEOUT_S)
            assert isinstance(frame, bytes if self.packed else str)
            event = msgpack.unpackb(frame) if self.packed else json.loads(frame)
            if kind in (None, event["type"]):
                return event

    def create(self, prompt, **fields):
        self.send(type="response.create", input=prompt, **fields)

    def finish(self, last="response.incomplete"):
        """Events up to the last one."""
        events = [self.receive()]
        while events[-1]["type"] != last:
            events.append(self.receive())
        return events


@contextlib.contextmanager
def opened(url, subprotocol=None):
    with connect(url, subprotocols=[subprotocol] if subprotocol else None, compression=None, proxy=None) as raw:
        assert raw.subprotocol == subprotocol
        yield Socket(raw)


def text_of(events):
    return "".join(event.get("delta", "") for event in events)


@pytest.mark.parametrize("subprotocol", [None, JSON, MSGPACK])
def test_a_prompt_streams_to_its_end(url, subprotocol):
    with opened(url, subprotocol) as socket:
        socket.create("aü🙂", max_output_tokens=21)
        events = socket.finish()
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert not any("stream_id" in event for event in events)
    assert text_of(events) == "aü🙂" * 3
    ids = [token for event in events for token in event.get("token_ids", [])]
    assert tuple(ids) == byte_codec().encode("aü🙂") * 3
    response = events[-1]["response"]
    assert response["output"][0]["content"][0]["text"] == "aü🙂" * 3
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    usage = response["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (7, 21, 28)


@pytest.mark.parametrize("subprotocol", [JSON, MSGPACK])
def test_streams_share_a_socket_and_stay_apart(url, subprotocol):
    prompts = {f"s{i}": f"prompt {i}. " for i in range(8)}
    with opened(url, subprotocol) as socket:
        for stream_id, prompt in prompts.items():
            socket.create(prompt, stream_id=stream_id, max_output_tokens=40)
        received = {stream_id: [] for stream_id in prompts}
        while not all(events and events[-1]["type"] == "response.incomplete" for events in received.values()):
            event = socket.receive()
            received[event["stream_id"]].append(event)
    for stream_id, events in received.items():
        assert text_of(events) == (prompts[stream_id] * 40)[:40]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))


@pytest.mark.parametrize("subprotocol", [JSON, MSGPACK])
@pytest.mark.parametrize("drafts", [0, 1, 3, 7])
def test_completions_and_log_probabilities_are_whole_in_blocks_of_any_size(url, subprotocol, drafts):
    prompt = "aü🙂 "
    with opened(url, subprotocol) as socket:
        socket.create(prompt, n=3, top_logprobs=2, speculative_tokens=drafts, max_output_tokens=19, stop="üü")
        events = socket.finish()
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    response = events[-1]["response"]
    ids = (byte_codec().encode(prompt) * 3)[:19]
    assert response["usage"]["output_tokens"] == 3 * 19
    assert len(response["usage"]["npucompile"]["completions"]) == 3
    for index, item in enumerate(response["output"]):
        deltas = [event for event in events if event["type"] == "response.output_text.delta" and event["output_index"] == index]
        assert tuple(token for delta in deltas for token in delta["token_ids"]) == ids
        shown = [entry for delta in deltas for entry in delta["logprobs"]]
        assert [(entry["token_id"], entry["logprob"]) for entry in shown] == [(token, -float(i)) for i, token in enumerate(ids)]
        assert all(len(entry["top_logprobs"]) == 2 for entry in shown)
        part = item["content"][0]
        assert [entry["token_id"] for entry in part["logprobs"]] == list(ids)
        assert bytes(value for entry in part["logprobs"] for value in entry["bytes"]).decode(errors="replace") == part["text"]
        assert part["text"] == byte_codec().decode(ids) == "".join(delta["delta"] for delta in deltas)


def test_a_stop_string_inside_a_block_ends_there_for_each_completion(url, engine):
    with opened(url) as socket:
        socket.create("?go stop it", n=2, top_logprobs=0, speculative_tokens=7, stop="stop")
        events = socket.finish("response.completed")
    response = events[-1]["response"]
    assert response["usage"]["output_tokens"] == 2 * len("?go stop")
    for item in response["output"]:
        assert (item["status"], item["content"][0]["text"]) == ("completed", "?go ")
        assert "".join(entry["token"] for entry in item["content"][0]["logprobs"]) == "?go stop"
    assert engine.wait_cancelled_by_id(response["id"], f"{response['id']}_1")


def test_cancel_ends_one_stream_and_not_the_other(url, engine):
    with opened(url) as socket:
        socket.create("?one", stream_id="a")
        socket.create("?two", stream_id="b")
        ids = {}
        while len(ids) < 2:
            event = socket.receive("response.created")
            ids[event["stream_id"]] = event["response"]["id"]
        socket.send(type="response.cancel", response_id=ids["a"])
        cancelled = socket.receive("response.cancelled")
        assert (cancelled["stream_id"], cancelled["response"]["status"]) == ("a", "cancelled")
        assert engine.wait_cancelled_by_id(ids["a"])
        assert ids["b"] not in engine.cancelled
        socket.send(type="response.cancel", stream_id="b")
        assert socket.receive("response.cancelled")["response"]["id"] == ids["b"]


def test_bad_frames_then_a_good_request_on_the_same_socket(url):
    with opened(url) as socket:
        for frame, code in [
            ("{", "invalid_json"),
            (b"\xff\xff", "invalid_utf8"),
            ("[]", "not_an_object"),
            ("{}", "missing_type"),
            ('{"type":"session.update"}', "unknown_type"),
            ('{"type":"response.create","input":"x","best_of":2}', "unknown_field"),
            ('{"type":"response.create","input":"' + "x" * 200 + '"}', "context_length_exceeded"),
            ('{"type":"response.cancel","stream_id":"z"}', "response_not_found"),
            ("x" * (LIMITS.max_frame_bytes + 1), "frame_too_large"),
        ]:
            socket.raw.send(frame)
            error = socket.receive()
            assert (error["type"], error["error"]["code"]) == ("error", code)
            assert error["error"]["message"]
        socket.create("good", max_output_tokens=4)
        assert text_of(socket.finish()) == "good"


@pytest.mark.parametrize(
    ("send", "code"),
    [
        (lambda raw: raw.send("x" * (LIMITS.transport_frame_bytes + 1)), 1009),
        (lambda raw: raw.send(["x" * LIMITS.max_frame_bytes] * 3), 1009),
        (lambda raw: raw.send(b"\xff\xfe", text=True), 1007),
    ],
    ids=["oversized", "oversized in fragments", "text that is not UTF-8"],
)
def test_what_the_transport_refuses_closes_one_socket_only(url, engine, send, code):
    with opened(url) as other:
        with opened(url) as socket:
            socket.create("?")
            response_id = socket.receive("response.created")["response"]["id"]
            # The server may have closed before the last fragment is sent.
            with contextlib.suppress(ConnectionClosed):
                send(socket.raw)
            with pytest.raises(ConnectionClosed) as closed:
                socket.finish()
            assert closed.value.rcvd.code == code
        assert engine.wait_cancelled_by_id(response_id)
        other.create("fine", max_output_tokens=4)
        assert text_of(other.finish()) == "fine"
    with opened(url) as fresh:
        fresh.create("fresh", max_output_tokens=5)
        assert text_of(fresh.finish()) == "fresh"


def test_closing_the_socket_cancels_all_its_responses(url, engine):
    with opened(url) as socket:
        for stream_id in ("a", "b"):
            socket.create("?", stream_id=stream_id, n=2)
        ids = [socket.receive("response.created")["response"]["id"] for _ in range(2)]
    ids += [f"{response_id}_1" for response_id in ids]
    assert engine.wait_cancelled_by_id(*ids)


def test_a_socket_lost_without_a_close_frame_cancels_too(url, engine):
    with opened(url) as socket:
        socket.create("?")
        response_id = socket.receive("response.created")["response"]["id"]
        socket.raw.socket.shutdown(2)
        assert engine.wait_cancelled_by_id(response_id)


def test_a_foreign_subprotocol_is_refused(url):
    with pytest.raises(InvalidStatus) as refused, opened(url, "graphql-ws"):
        pass
    assert refused.value.response.status_code == 400
    assert b"npucompile.json" in refused.value.response.body


@pytest.mark.parametrize("path", ["/v1/responses/other", "/v1", "/", "/ws", "/v1/completions"])
def test_another_path_is_no_websocket_and_the_right_one_is_said(url, path):
    with pytest.raises(InvalidStatus) as refused, opened(url.replace("/v1/responses", path)):
        pass
    assert refused.value.response.status_code == 404
    assert f"no websocket at '{path}'; legal is /v1/responses" in json.loads(refused.value.response.body)["error"]["message"]


def test_a_stopping_server_closes_its_sockets_with_1012(engine):
    with contextlib.ExitStack() as stack:
        with serving(Service(engine, byte_codec(), MODEL)) as url:
            socket = stack.enter_context(opened(url))
            socket.create("?")
            response_id = socket.receive("response.created")["response"]["id"]
        assert engine.wait_cancelled_by_id(response_id)
        with pytest.raises(ConnectionClosed) as closed:
            socket.finish()
        assert closed.value.rcvd.code == 1012
