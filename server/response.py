"""One response: its engine requests, and the server events that their engine events become."""

from __future__ import annotations

from dataclasses import dataclass

from ..runtime.request import Event, Request
from .events import ResponseEvents, ResponseInfo, ServerEvent
from .generation import Generation
from .logprobs import token_objects
from .output_stream import TextDelta
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
        self._generation = Generation(prepared.requests, tokenizer, prepared.stop)

    @property
    def done(self) -> bool:
        """Whether the last event has been returned."""
        return self._generation.done

    @property
    def live(self) -> tuple[str, ...]:
        """Ids of the requests that have not ended."""
        return self._generation.live

    def begin(self) -> list[ServerEvent]:
        """The events that open the response, once the engine has accepted its requests."""
        return self._events.begin()

    def feed(self, event: Event) -> list[ServerEvent]:
        """The server events for one engine event."""
        events: list[ServerEvent] = []
        for index, output in self._generation.feed(event):
            if isinstance(output, TextDelta):
                events += self._delta(index, output)
                continue
            events += self._events.close(index, output.status)
            if self.done:
                events += self._events.end(self._generation.ends)
        return events

    def take_stopped(self) -> tuple[str, ...]:
        """Ids of the requests in which a stop string was found since the last call; the engine should cancel them."""
        return self._generation.take_stopped()

    def _delta(self, index: int, delta: TextDelta) -> list[ServerEvent]:
        logprobs = token_objects(self._tokenizer.token_text, delta.token_ids, delta.logprobs) if delta.logprobs else []
        return self._events.delta(index, delta.text, delta.token_ids, logprobs)
