"""One response: its engine requests, and the server events that their engine events become."""

from __future__ import annotations

from dataclasses import dataclass

from ..runtime.request import Event, Request, TokenEvent
from .events import CompletionEnd, ResponseEvents, ResponseInfo, ServerEvent
from .logprobs import token_objects
from .output_stream import OutputStream, TextDelta
from .tokenizer import TextTokenizer


@dataclass(frozen=True)
class PreparedResponse:
    """A validated response that has not been submitted.

    Attributes:
        info: fields that its events repeat.
        requests: engine requests, one per completion.
        stop: stop strings.
    """

    info: ResponseInfo
    requests: tuple[Request, ...]
    stop: tuple[str, ...] = ()


class Response:
    """One response from acceptance to its last event; no I/O, no clock."""

    def __init__(self, prepared: PreparedResponse, tokenizer: TextTokenizer) -> None:
        self._events = ResponseEvents(prepared.info, len(prepared.requests))
        self._tokenizer = tokenizer
        self._index = {request.id: index for index, request in enumerate(prepared.requests)}
        self._streams = [OutputStream(tokenizer.detokenizer(), prepared.stop) for _ in prepared.requests]
        self._ends: dict[str, CompletionEnd] = {}
        self._stopped: list[str] = []

    @property
    def done(self) -> bool:
        """Whether the last event has been returned."""
        return len(self._ends) == len(self._index)

    @property
    def live(self) -> tuple[str, ...]:
        """Ids of the requests that have not ended."""
        return tuple(request_id for request_id in self._index if request_id not in self._ends)

    def begin(self) -> list[ServerEvent]:
        """The events that open the response, once the engine has accepted its requests."""
        return self._events.begin()

    def feed(self, event: Event) -> list[ServerEvent]:
        """The server events for one engine event."""
        if event.request_id in self._ends:
            return []
        index = self._index[event.request_id]
        stream = self._streams[index]
        if isinstance(event, TokenEvent):
            was_stopped = stream.stopped
            events = self._delta(index, stream.push(event))
            if stream.stopped and not was_stopped:
                self._stopped.append(event.request_id)
            return events
        delta, end = stream.finish(event)
        self._ends[event.request_id] = end
        events = [*self._delta(index, delta), *self._events.close(index, end.status)]
        return [*events, *self._events.end([self._ends[name] for name in self._index])] if self.done else events

    def take_stopped(self) -> tuple[str, ...]:
        """Ids of the requests in which a stop string was found since the last call; the engine should cancel them."""
        stopped, self._stopped = tuple(self._stopped), []
        return stopped

    def _delta(self, index: int, delta: TextDelta | None) -> list[ServerEvent]:
        if delta is None:
            return []
        logprobs = token_objects(self._tokenizer.token_text, delta.token_ids, delta.logprobs) if delta.logprobs else []
        return self._events.delta(index, delta.text, delta.token_ids, logprobs)
