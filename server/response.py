"""Turns the engine events of the requests of one response into its server events."""

from __future__ import annotations

from dataclasses import dataclass

from ..runtime.request import Event, Request, TokenEvent
from .events import Ending, Head, ResponseEvents, ServerEvent
from .logprobs import token_objects
from .output_stream import Piece, Transcript
from .tokenizer import TextCodec


@dataclass(frozen=True)
class Job:
    """An accepted response.

    Attributes:
        requests: what the engine is asked, one per completion.
        stop: strings that end an output.
    """

    head: Head
    requests: tuple[Request, ...]
    stop: tuple[str, ...] = ()


class Answer:
    """One response from acceptance to its last event; no I/O, no clock. What is shown of each completion, and when, is its Transcript's."""

    def __init__(self, job: Job, codec: TextCodec) -> None:
        self._events = ResponseEvents(job.head, len(job.requests))
        self._codec = codec
        self._index = {request.id: index for index, request in enumerate(job.requests)}
        self._transcripts = [Transcript(codec.detokenizer(), job.stop) for _ in job.requests]
        self._endings: dict[str, Ending] = {}
        self._stopped: list[str] = []

    @property
    def done(self) -> bool:
        """The last event has been handed out."""
        return len(self._endings) == len(self._index)

    @property
    def live(self) -> tuple[str, ...]:
        """Ids of the requests that have not ended."""
        return tuple(request_id for request_id in self._index if request_id not in self._endings)

    def begin(self) -> list[ServerEvent]:
        """The engine has taken the requests."""
        return self._events.begin()

    def feed(self, event: Event) -> list[ServerEvent]:
        """What one engine event means to the client."""
        if event.request_id in self._endings:
            return []
        index = self._index[event.request_id]
        transcript = self._transcripts[index]
        if isinstance(event, TokenEvent):
            was_stopped = transcript.stopped
            events = self._delta(index, transcript.push(event))
            if transcript.stopped and not was_stopped:
                self._stopped.append(event.request_id)
            return events
        piece, ending = transcript.finish(event)
        self._endings[event.request_id] = ending
        events = [*self._delta(index, piece), *self._events.close(index, ending.status)]
        return [*events, *self._events.end([self._endings[name] for name in self._index])] if self.done else events

    def take_stopped(self) -> tuple[str, ...]:
        """Ids of the requests in which a stop string was found since the last call: the engine should be told to cancel them."""
        taken, self._stopped = tuple(self._stopped), []
        return taken

    def _delta(self, index: int, piece: Piece | None) -> list[ServerEvent]:
        if piece is None:
            return []
        logprobs = token_objects(self._codec.spell, piece.token_ids, piece.logprobs) if piece.logprobs else []
        return self._events.delta(index, piece.text, piece.token_ids, logprobs)
