"""The whole server over real sockets: uvicorn on a loopback port, an engine on a thread of its own."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import deque
from functools import cache

import msgpack
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from npucompile.runtime.request import ExecutionRecord, FinishEvent, Logprobs, TokenEvent
from npucompile.server.protocol import JSON, MSGPACK
from npucompile.server.run import serving
from npucompile.server.service import ServedModel, Service
from npucompile.server.tokenizer import TextTokenizer
from npucompile.server.websocket import SocketLimits

RECORD = ExecutionRecord(0.0, 1.0, 2.0, (), (), 0, 0)
MODEL = ServedModel("tiny", max_model_len=128, vocab_size=256)
LIMITS = SocketLimits(max_frame_bytes=4096)
PATIENCE_S = 60


@cache
def codec() -> TextTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TextTokenizer(tokenizer)


class EchoEngine:
    """Answers a prompt with itself, over and over, a token and as many drafts of each live request a turn; a prompt that begins with
    "?" stays silent after its first turn until it is cancelled. Log probabilities tell the place they are of."""

    def __init__(self):
        self._wake = threading.Condition()
        self._live = {}
        self._cancelled = deque()
        self._stopping = False
        self.seen_cancelled = set()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def submit(self, request, sink):
        with self._wake:
            self._live[request.id] = (request, sink, [])
            self._wake.notify_all()

    def cancel(self, request_id):
        with self._wake:
            self._cancelled.append(request_id)
            self._wake.notify_all()

    def stats(self):
        with self._wake:
            return {"num_requests_running": len(self._live), "compiles_after_ready_total": 0, "bucket_steps": {"decode-b2-q1": 3}}

    def wait_cancelled(self, request_id):
        with self._wake:
            return self._wake.wait_for(lambda: request_id in self.seen_cancelled, PATIENCE_S)

    def close(self):
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        self._thread.join()

    def _run(self):
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._stopping or self._cancelled or any(map(self._can_step, self._live.values())))
                if self._stopping:
                    return
                cancelled = [self._live.pop(name) for name in self._cancelled if name in self._live]
                self.seen_cancelled.update(self._cancelled)
                self._cancelled.clear()
                turns = [live for live in self._live.values() if self._can_step(live)]
                self._wake.notify_all()
            for request, sink, made in cancelled:
                sink(FinishEvent(request.id, "cancelled", len(request.prompt), len(made), RECORD))
            for request, sink, made in turns:
                start = len(made)
                end = min(start + 1 + (request.speculative_tokens or 0), request.max_tokens)
                made += [request.prompt[place % len(request.prompt)] for place in range(start, end)]
                sink(TokenEvent(request.id, tuple(made[start:]), self._logprobs(request, made, start)))
                if len(made) == request.max_tokens:
                    with self._wake:
                        del self._live[request.id]
                    sink(FinishEvent(request.id, "length", len(request.prompt), len(made), RECORD))

    @staticmethod
    def _logprobs(request, made, start):
        if request.logprobs is None:
            return ()
        return tuple(Logprobs(-float(i), ((made[i], -0.5),) * request.logprobs) for i in range(start, len(made)))

    @staticmethod
    def _can_step(live):
        request, _, made = live
        return not made or codec().decode(request.prompt[:1]) != "?"


@pytest.fixture(scope="module")
def engine():
    with contextlib.closing(EchoEngine()) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine):
    with serving(Service(engine, codec(), MODEL), limits=LIMITS) as url:
        yield url


class Socket:
    """A socket of the `websockets` library that speaks either subprotocol."""

    def __init__(self, raw):
        self.raw = raw
        self.packed = raw.subprotocol == MSGPACK

    def say(self, **event):
        self.raw.send(msgpack.packb(event) if self.packed else json.dumps(event))

    def hear(self, kind=None):
        while True:
            frame = self.raw.recv(timeout=PATIENCE_S)
            assert isinstance(frame, bytes if self.packed else str)
            event = msgpack.unpackb(frame) if self.packed else json.loads(frame)
            if kind in (None, event["type"]):
                return event

    def create(self, prompt, **fields):
        self.say(type="response.create", input=prompt, **fields)

    def finish(self, last="response.incomplete"):
        """Events up to the last one."""
        events = [self.hear()]
        while events[-1]["type"] != last:
            events.append(self.hear())
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
    assert {event["stream_id"] for event in events} == {"0"}
    assert text_of(events) == "aü🙂" * 3
    ids = [token for event in events for token in event.get("token_ids", [])]
    assert tuple(ids) == codec().encode("aü🙂") * 3
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
        seen = {stream_id: [] for stream_id in prompts}
        while not all(events and events[-1]["type"] == "response.incomplete" for events in seen.values()):
            event = socket.hear()
            seen[event["stream_id"]].append(event)
    for stream_id, events in seen.items():
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
    ids = (codec().encode(prompt) * 3)[:19]
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
        assert part["text"] == codec().decode(ids) == "".join(delta["delta"] for delta in deltas)


def test_a_stop_string_inside_a_block_ends_there_for_each_completion(url, engine):
    with opened(url) as socket:
        socket.create("go stop it", n=2, top_logprobs=0, speculative_tokens=7, stop="stop")
        events = socket.finish("response.completed")
    response = events[-1]["response"]
    assert response["usage"]["output_tokens"] == 2 * len("go stop")
    for item in response["output"]:
        assert (item["status"], item["content"][0]["text"]) == ("completed", "go ")
        assert "".join(entry["token"] for entry in item["content"][0]["logprobs"]) == "go stop"
    assert all(engine.wait_cancelled(name) for name in (response["id"], f"{response['id']}_1"))


def test_cancel_ends_one_stream_and_not_the_other(url, engine):
    with opened(url) as socket:
        socket.create("?one", stream_id="a")
        socket.create("?two", stream_id="b")
        ids = {}
        while len(ids) < 2:
            event = socket.hear("response.created")
            ids[event["stream_id"]] = event["response"]["id"]
        socket.say(type="response.cancel", response_id=ids["a"])
        cancelled = socket.hear("response.cancelled")
        assert (cancelled["stream_id"], cancelled["response"]["status"]) == ("a", "cancelled")
        assert engine.wait_cancelled(ids["a"])
        assert ids["b"] not in engine.seen_cancelled
        socket.say(type="response.cancel", stream_id="b")
        assert socket.hear("response.cancelled")["response"]["id"] == ids["b"]


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
            error = socket.hear()
            assert (error["type"], error["error"]["code"]) == ("error", code)
            assert error["error"]["message"]
        socket.create("good", max_output_tokens=4)
        assert text_of(socket.finish()) == "good"


def test_bad_msgpack_then_a_good_request_on_the_same_socket(url):
    with opened(url, MSGPACK) as socket:
        for frame, code in [(b"\xc1", "invalid_msgpack"), ("{}", "wrong_frame_kind"), (msgpack.packb([]), "not_an_object")]:
            socket.raw.send(frame)
            assert socket.hear()["error"]["code"] == code
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
            response_id = socket.hear("response.created")["response"]["id"]
            send(socket.raw)
            with pytest.raises(ConnectionClosed) as closed:
                socket.finish()
            assert closed.value.rcvd.code == code
        assert engine.wait_cancelled(response_id)
        other.create("fine", max_output_tokens=4)
        assert text_of(other.finish()) == "fine"
    with opened(url) as fresh:
        fresh.create("fresh", max_output_tokens=5)
        assert text_of(fresh.finish()) == "fresh"


def test_leaving_cancels_everything_on_the_socket(url, engine):
    with opened(url) as socket:
        for stream_id in ("a", "b"):
            socket.create("?", stream_id=stream_id, n=2)
        ids = [socket.hear("response.created")["response"]["id"] for _ in range(2)]
    ids += [f"{response_id}_1" for response_id in ids]
    assert all(engine.wait_cancelled(response_id) for response_id in ids)


def test_dropping_the_line_without_goodbye_cancels_too(url, engine):
    with opened(url) as socket:
        socket.create("?")
        response_id = socket.hear("response.created")["response"]["id"]
        socket.raw.socket.shutdown(2)
        assert engine.wait_cancelled(response_id)


def test_a_foreign_subprotocol_is_refused(url):
    with pytest.raises(InvalidStatus) as refused, opened(url, "graphql-ws"):
        pass
    assert refused.value.response.status_code == 400
    assert b"npucompile.json" in refused.value.response.body


def test_another_path_is_no_websocket(url):
    with pytest.raises(InvalidStatus) as refused, opened(url + "/other"):
        pass
    assert refused.value.response.status_code == 403


def test_the_server_says_goodbye_when_it_stops(engine):
    with contextlib.ExitStack() as stack:
        with serving(Service(engine, codec(), MODEL)) as url:
            socket = stack.enter_context(opened(url))
            socket.create("?")
            response_id = socket.hear("response.created")["response"]["id"]
        assert engine.wait_cancelled(response_id)
        with pytest.raises(ConnectionClosed) as closed:
            socket.finish()
        assert closed.value.rcvd.code == 1012
