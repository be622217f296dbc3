"""Turns accepted messages into engine requests, and engine events into callbacks on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol

from ..graphs.errors import RequestError
from ..runtime.request import Event, Request
from .answer import Answer, Job
from .connection import Create
from .events import Head
from .protocol import Messages, ResponseCreate
from .text import TextCodec


class Engine(Protocol):
    """What the server needs of `runtime.engine`; all three are called from any thread."""

    def submit(self, request: Request, sink: Callable[[Event], None]) -> None:
        """Queues a request; `sink` gets its events, the FinishEvent last, on the engine's thread.

        Raises:
            RequestError: the request can never be served.
        """

    def cancel(self, request_id: str) -> object:
        """Ends a request early, with a FinishEvent of reason "cancelled"; unknown and finished ones are left alone."""

    def stats(self) -> Mapping[str, Any]:
        """Flat numbers by name; `bucket_steps` maps bucket names to numbers, `backends` to backend names."""


@dataclass(frozen=True)
class ServedModel:
    """The model behind the socket.

    Attributes:
        max_model_len: most tokens of prompt and output together.
        vocab_size: V; legal token ids are below it.
        eos_token_ids: ids that end an output.
        created_s: Unix time it was built.
        artifact: digest of the artifact, where it comes from one.
    """

    name: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    created_s: int = 0
    artifact: str | None = None


def _always_ok() -> Mapping[str, Any]:
    return {"status": "ok"}


class Service:
    """One engine with its tokenizer, as the sockets see it.

    Args:
        readiness: what /health says; `status` is "ok" or "starting", the rest is detail.
        clock: Unix time in seconds.
    """

    def __init__(
        self,
        engine: Engine,
        codec: TextCodec,
        model: ServedModel,
        *,
        readiness: Callable[[], Mapping[str, Any]] = _always_ok,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.model = model
        self.readiness = readiness
        self._engine = engine
        self._codec = codec
        self._clock = clock

    def prepare(self, create: Create) -> Job:
        """Checks a message against the model and tokenizes its prompt.

        Raises:
            RequestError: wrong model, empty or too long prompt, ids outside the vocabulary, or a conversation.
        """
        body = create.body
        if body.model not in (None, self.model.name):
            raise RequestError(f"model is {body.model!r}; served here is {self.model.name!r}", param="model", code="model_not_found")
        prompt = self._token_ids(body)
        request = Request(
            id=create.response_id,
            prompt=prompt,
            max_tokens=self._max_tokens(len(prompt), body.max_output_tokens),
            sampling=body.sampling,
            stop_token_ids=frozenset() if body.ignore_eos else self.model.eos_token_ids,
        )
        head = Head(
            response_id=create.response_id,
            stream_id=create.stream_id,
            model=self.model.name,
            created_s=int(self._clock()),
            max_output_tokens=request.max_tokens,
            temperature=body.sampling.temperature,
            top_p=body.sampling.top_p,
        )
        return Job(head, request, body.stop)

    def answer(self, job: Job) -> Answer:
        """The response's side of a job, with a detokenizer of its own."""
        return Answer(job, self._codec.detokenizer())

    def submit(self, request: Request, deliver: Callable[[Event], None]) -> None:
        """Hands a request to the engine; `deliver` is called with its events on the running loop, in order.

        Raises:
            RequestError: the engine refuses it; `deliver` is then never called.
        """
        self._engine.submit(request, Mailbox(asyncio.get_running_loop(), deliver).post)

    def cancel(self, request_id: str) -> None:
        """Asks the engine to end a request; harmless when it has ended."""
        self._engine.cancel(request_id)

    def stats(self) -> Mapping[str, Any]:
        """The engine's numbers."""
        return self._engine.stats()

    def _token_ids(self, body: ResponseCreate) -> tuple[int, ...]:
        prompt = body.prompt
        if isinstance(prompt, Messages):
            raise RequestError(
                f"input is a list of {len(prompt.items)} messages, but chat templates are not supported by model {self.model.name!r}; "
                "legal are text in input, or input_token_ids",
                param="input",
                code="chat_template_missing",
            )
        if isinstance(prompt, str):
            prompt = self._codec.encode(prompt)
            param = "input"
        else:
            param = "input_token_ids"
        if not prompt:
            raise RequestError(f"{param} holds no tokens; legal is a prompt of at least 1", param=param, code="empty_prompt")
        bad = next((token for token in prompt if not 0 <= token < self.model.vocab_size), None)
        if bad is not None:
            message = f"token id {bad} in {param}; legal are 0 to {self.model.vocab_size - 1}"
            raise RequestError(message, param=param, code="token_out_of_range")
        return prompt

    def _max_tokens(self, prompt_tokens: int, asked: int | None) -> int:
        limit = self.model.max_model_len
        room = limit - prompt_tokens
        if room < 1:
            message = f"input has {prompt_tokens} tokens and needs room for 1 more; the context of {self.model.name!r} is {limit} tokens"
            raise RequestError(message, param="input", code="context_length_exceeded")
        if asked is not None and asked > room:
            message = f"input has {prompt_tokens} tokens and max_output_tokens is {asked}; together at most {limit} are legal"
            raise RequestError(message, param="max_output_tokens", code="context_length_exceeded")
        return room if asked is None else asked


class Mailbox:
    """Carries events from the engine's thread to a callback on the loop, in order, waking the loop once per burst."""

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[Event], None]) -> None:
        self._loop = loop
        self._deliver = deliver
        self._events: deque[Event] = deque()
        self._awake = False
        self._lock = Lock()

    def post(self, event: Event) -> None:
        """Called on any thread; after the loop has closed, events have no reader and are dropped."""
        with self._lock:
            self._events.append(event)
            if self._awake:
                return
            self._awake = True
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        with self._lock:
            events, self._events = self._events, deque()
            self._awake = False
        for event in events:
            self._deliver(event)
