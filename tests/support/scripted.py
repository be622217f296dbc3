"""An engine that says what it is told to, and its server."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from support.texts import byte_codec

from npucompile.graphs.errors import RequestError
from npucompile.runtime.histogram import Histogram
from npucompile.runtime.request import Event, ExecutionRecord, FinishEvent, Logprobs, Request, TokenEvent
from npucompile.server.engine.service import ServedModel, Service
from npucompile.server.run import serving
from npucompile.server.text.tokenizer import TextTokenizer

MODEL = ServedModel("tiny", max_model_len=4096, vocab_size=256, created_s=1700000000, artifact="ab" * 32, aliases=("small",))
RECORD = ExecutionRecord(0.0, 1.0, 2.0, (), (), 0, 0, cached_tokens=1, verify_steps=2, drafted_tokens=6, accepted_per_position=(2, 1, 0))
TIMEOUT_S = 30


class ScriptedEngine:
    """Answers each prompt with `says(text of the prompt)`, until that ends ("stop") or its limit is reached. A byte is a token, and a step
    has one, and as many more as a request asks for drafts.

    Output token i has log probability -i; token 0 (log probability -0.5) and the token itself are the most likely ones. A request whose
    answer ends in "…" waits there until it is cancelled; one that comes to `fails` fails.

    Attributes:
        requests: all that were submitted.
        cancelled: ids of those that were cancelled while they ran.
    """

    def __init__(
        self,
        says: Callable[[str], str] = lambda prompt: prompt,
        tokens_per_step: int = 1,
        fails: str = "",
        codec: TextTokenizer | None = None,
    ) -> None:
        self.says, self.requests, self.cancelled, self.flushes = says, [], set(), 0
        self._codec = codec or byte_codec()
        self._step, self._fails = tokens_per_step, self._codec.encode(fails)
        self._wake = threading.Condition()
        self._live: deque[Any] = deque()
        self._to_cancel: list[str] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    hold = release = lambda self: None

    def submit(self, request: Request, sink: Any) -> None:
        if request.logprobs is not None and request.logprobs > 5:
            raise RequestError("logprobs is too large; legal is an integer from 0 to 5, or null", param="logprobs")
        text = self.says(self._codec.decode(request.prompt, skip_special=False))
        waits = text.endswith("…")
        tokens = self._codec.encode(text.removesuffix("…"))
        with self._wake:
            self.requests.append(request)
            self._live.append((request, sink, tokens, waits, [0]))
            self._wake.notify_all()

    def cancel(self, *request_ids: str) -> None:
        with self._wake:
            self._to_cancel += request_ids
            self._wake.notify_all()

    def flush_prefix_cache(self) -> bool:
        self.flushes += 1
        return True

    def stats(self) -> dict[str, Any]:
        with self._wake:
            histograms = {"seconds": Histogram((1.0,)).snapshot()}
            groups: dict[str, Any] = {
                "dp_requests_running": {0: len(self._live)},
                "dp_requests_waiting": {0: 0},
                "dp_prompt_tokens": {0: 0},
            }
            return {"num_requests_running": len(self._live), "num_requests_waiting": 0, "histograms": histograms, **groups}

    def wait_cancelled(self, count: int = 1) -> bool:
        with self._wake:
            return self._wake.wait_for(lambda: len(self.cancelled) >= count, TIMEOUT_S)

    def wait_cancelled_by_id(self, *request_ids: str) -> bool:
        with self._wake:
            return self._wake.wait_for(lambda: self.cancelled >= set(request_ids), TIMEOUT_S)

    def wait_submitted(self, count: int = 1) -> bool:
        with self._wake:
            return self._wake.wait_for(lambda: len(self.requests) >= count, TIMEOUT_S)

    def close(self) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify_all()
        self._thread.join()

    def _run(self) -> None:
        def ready(live: Any) -> bool:
            _, _, tokens, waits, (done,) = live
            return done < len(tokens) or not waits

        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._stopping or self._to_cancel or any(map(ready, self._live)))
                if self._stopping:
                    return
                ended = [live for live in self._live if live[0].id in self._to_cancel]
                self._to_cancel = []
                steps = [live for live in self._live if live not in ended and ready(live)]
            events = [(live, FinishEvent(live[0].id, "cancelled", len(live[0].prompt), live[4][0], RECORD)) for live in ended]
            for live in steps:
                events += [(live, event) for event in self._events(live)]
            over = [live for live, event in events if isinstance(event, FinishEvent)]
            with self._wake:
                self._live = deque(live for live in self._live if live not in over)
                self.cancelled |= {live[0].id for live in ended}
                self._wake.notify_all()
            for live, event in events:
                live[1](event)

    def _events(self, live: Any) -> Iterator[TokenEvent | FinishEvent]:
        request, _, tokens, waits, done = live
        most = min(len(tokens), request.max_tokens)
        new = tokens[done[0] : min(done[0] + self._step + (request.speculative_tokens or 0), most)]
        if self._fails and new[:1] == self._fails:
            yield FinishEvent(request.id, "error", len(request.prompt), done[0], RECORD, "the device is gone")
            return
        stop = next((i for i, token in enumerate(new) if token in request.stop_token_ids), None)
        shown = new if stop is None else new[:stop]
        logprobs = ()
        if request.logprobs is not None:
            top = ((0, -0.5), *((token, -1.5) for token in range(1, request.logprobs)))[: request.logprobs]
            logprobs = tuple(Logprobs(-float(done[0] + i), top) for i in range(len(shown)))
        done[0] += len(shown) + (stop is not None)
        if shown:
            yield TokenEvent(request.id, tuple(shown), logprobs)
        if stop is not None or (done[0] == len(tokens) < request.max_tokens and not waits):
            yield FinishEvent(request.id, "stop", len(request.prompt), done[0], RECORD)
        elif done[0] == request.max_tokens:
            yield FinishEvent(request.id, "length", len(request.prompt), done[0], RECORD)


class ManualEngine:
    """Accepts requests; the test says what comes of them, by `emit` and `finish`.

    Attributes:
        sinks, requests: of all that were submitted, by id.
        cancelled: ids in the order in which they were cancelled.
        passes: number of calls of `cancel`.
        refusal: what is raised instead of accepting a request; None accepts.
    """

    def __init__(self) -> None:
        self.sinks: dict[str, Callable[[Event], None]] = {}
        self.requests: dict[str, Request] = {}
        self.cancelled: list[str] = []
        self.passes = 0
        self.refusal: Exception | None = None

    hold = release = lambda self: None

    def submit(self, request: Request, sink: Callable[[Event], None]) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.requests[request.id], self.sinks[request.id] = request, sink

    def cancel(self, *request_ids: str) -> None:
        self.cancelled += request_ids
        self.passes += 1

    def stats(self) -> dict[str, Any]:
        return {}

    def emit(self, request_id: str, text: str) -> None:
        self.sinks[request_id](TokenEvent(request_id, byte_codec().encode(text)))

    def finish(self, request_id: str, reason: str = "stop", count: int = 0) -> None:
        self.sinks[request_id](FinishEvent(request_id, reason, 1, count, RECORD))


@contextlib.contextmanager
def scripted(says: Callable[[str], str] = lambda prompt: prompt, *, fails: str = "", **options: Any) -> Iterator[tuple[str, Any]]:
    """A server of such an engine: the URL of its HTTP API, and the engine. `options` are of the service, `codec` its tokenizer."""
    codec = options.pop("codec", None) or byte_codec()
    with contextlib.closing(ScriptedEngine(says, fails=fails, codec=codec)) as engine:
        service = Service(engine, codec, options.pop("model", MODEL), clock=lambda: 1700000000.9, **options)
        with serving(service) as url:
            yield url.replace("ws://", "http://").removesuffix("/responses"), engine
