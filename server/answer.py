"""Turns the engine events of one request into the server events of one response."""

from __future__ import annotations

from dataclasses import dataclass

from ..runtime.request import Event, FinishEvent, Request, TokenEvent
from .events import Head, ResponseEvents, ServerEvent, Usage
from .text import Detokenizer, StopMatcher


@dataclass(frozen=True)
class Job:
    """An accepted response.

    Attributes:
        request: what the engine is asked.
        stop: strings that end the output.
    """

    head: Head
    request: Request
    stop: tuple[str, ...] = ()


class Answer:
    """One response from acceptance to its last event; no I/O, no clock.

    Concatenated over all deltas, `token_ids` are the tokens the engine showed, up to and with the one that completed a stop string.
    Usage counts what was generated, which may be one more: the engine does not show the end-of-sequence token.

    Attributes:
        done: the last event has been handed out.
        stopped: a stop string was found, so the engine should be told to cancel; the response will still end as completed.
    """

    def __init__(self, job: Job, detokenizer: Detokenizer) -> None:
        self._events = ResponseEvents(job.head)
        self._detokenizer = detokenizer
        self._stop = StopMatcher(job.stop) if job.stop else None
        self._pending: list[int] = []
        self._output_tokens = 0
        self.done = False
        self.stopped = False

    def begin(self) -> list[ServerEvent]:
        """The engine has taken the request."""
        return self._events.begin()

    def feed(self, event: Event) -> list[ServerEvent]:
        """What one engine event means to the client."""
        if self.done:
            return []
        if isinstance(event, TokenEvent):
            return self._tokens(event.token_ids)
        return self._finish(event)

    def _tokens(self, token_ids: tuple[int, ...]) -> list[ServerEvent]:
        text = ""
        # Token by token where a stop string may end the output between two of them.
        for piece in ((token,) for token in token_ids) if self._stop else (token_ids,):
            if self.stopped:
                break
            self._pending.extend(piece)
            self._output_tokens += len(piece)
            text += self._checked(self._detokenizer.push(piece))
        return self._delta(text) if text else []

    def _finish(self, event: FinishEvent) -> list[ServerEvent]:
        self.done = True
        text = ""
        if not self.stopped:
            text = self._checked(self._detokenizer.flush())
            if self._stop and not self.stopped:
                text += self._stop.flush()
        last = self._delta(text) if text or self._pending else []
        usage = Usage(event.prompt_tokens, self._output_tokens if self.stopped else event.completion_tokens, event.record)
        reason = "stop" if self.stopped and event.reason in ("cancelled", "length") else event.reason
        return [*last, *self._events.end(reason, usage, event.message)]

    def _checked(self, text: str) -> str:
        if self._stop is None:
            return text
        text = self._stop.push(text)
        self.stopped = self.stopped or self._stop.hit
        return text

    def _delta(self, text: str) -> list[ServerEvent]:
        token_ids, self._pending = self._pending, []
        return self._events.delta(text, token_ids)
