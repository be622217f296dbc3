"""Turns the progress of one response into server events in OpenAI's shapes.

Every event of a response carries `sequence_number` (from 0, without gaps) and `stream_id`. Extensions: deltas carry `token_ids`,
usage carries the execution record under `npucompile`. A response ends with exactly one of the types in TERMINAL_TYPES. An `error`
event refuses a message; it is not part of a response and never ends one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..graphs.errors import ProtocolError, RequestError
from ..runtime.request import ExecutionRecord
from .connection import refusal

ServerEvent = dict[str, Any]

STATUS_BY_REASON: Mapping[str, str] = {"stop": "completed", "length": "incomplete", "cancelled": "cancelled", "error": "failed"}
"""Engine finish reason to response status; the last event of a response is `response.<status>`."""

TERMINAL_TYPES = tuple(f"response.{status}" for status in STATUS_BY_REASON.values())


@dataclass(frozen=True)
class Head:
    """What every event of a response repeats.

    Attributes:
        created_s: Unix time.
        max_output_tokens: as in force, defaults resolved.
    """

    response_id: str
    stream_id: str
    model: str
    created_s: int
    max_output_tokens: int
    temperature: float
    top_p: float


@dataclass(frozen=True)
class Usage:
    """Tokens a response took, and how they were served."""

    input_tokens: int
    output_tokens: int
    record: ExecutionRecord

    def as_event(self) -> ServerEvent:
        """The usage object of OpenAI's shape with our record beside it."""
        record = asdict(self.record)
        record["prefill_chunks"] = list(self.record.prefill_chunks)
        record["decode_steps"] = dict(self.record.decode_steps)
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.record.cached_tokens},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.input_tokens + self.output_tokens,
            "npucompile": record,
        }


def error_event(error: Exception, *, stream_id: str | None = None) -> ServerEvent:
    """A refusal as an event. Anything but a ProtocolError or RequestError is the server's own fault and told without detail."""
    kind, status, code, message, param = "invalid_request_error", 400, "invalid_request_error", str(error), None
    if isinstance(error, ProtocolError):
        code = error.code
        param, named = refusal(error)
        stream_id = stream_id or named
    elif isinstance(error, RequestError):
        code, param = error.code, error.param
    else:
        kind, status, code = "server_error", 500, "internal_error"
        message = "the server failed to handle this message; its log has the reason"
    event: ServerEvent = {"type": "error", "status": status, "error": {"type": kind, "code": code, "message": message, "param": param}}
    if stream_id is not None:
        event["stream_id"] = stream_id
    return event


class ResponseEvents:
    """Numbers and shapes the events of one response: `begin`, any number of `delta`, one `end`."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._item_id = "msg_" + head.response_id.removeprefix("resp_")
        self._sequence = 0
        self._text: list[str] = []
        self._item_open = False

    def begin(self) -> list[ServerEvent]:
        """The response is accepted."""
        return [
            self._event("response.created", response=self._response("in_progress")),
            self._event("response.in_progress", response=self._response("in_progress")),
        ]

    def delta(self, text: str, token_ids: Sequence[int]) -> list[ServerEvent]:
        """Text is safe to show; `token_ids` are the tokens taken since the last delta."""
        opening = self._open_item()
        self._text.append(text)
        return [*opening, self._event("response.output_text.delta", **self._place(), delta=text, logprobs=[], token_ids=list(token_ids))]

    def end(self, reason: str, usage: Usage, message: str | None = None) -> list[ServerEvent]:
        """The last events.

        Args:
            reason: one of runtime.request.FINISH_REASONS.
            message: what went wrong, for reason "error".
        """
        status = STATUS_BY_REASON[reason]
        events: list[ServerEvent] = []
        if status == "completed" or self._item_open:
            events += [*self._open_item(), *self._close_item(status)]
        response = self._response(status, usage)
        if status == "failed":
            response["error"] = {"code": "server_error", "message": message or "the engine gave no reason"}
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return [*events, self._event(f"response.{status}", response=response)]

    def _open_item(self) -> list[ServerEvent]:
        if self._item_open:
            return []
        self._item_open = True
        return [
            self._event("response.output_item.added", output_index=0, item=self._item("in_progress", [])),
            self._event("response.content_part.added", **self._place(), part=_text_part("")),
        ]

    def _close_item(self, status: str) -> list[ServerEvent]:
        text = "".join(self._text)
        part = _text_part(text)
        return [
            self._event("response.output_text.done", **self._place(), text=text, logprobs=[]),
            self._event("response.content_part.done", **self._place(), part=part),
            self._event("response.output_item.done", output_index=0, item=self._item(_item_status(status), [part])),
        ]

    def _place(self) -> ServerEvent:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _item(self, status: str, content: list[ServerEvent]) -> ServerEvent:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _response(self, status: str, usage: Usage | None = None) -> ServerEvent:
        output = [self._item(_item_status(status), [_text_part("".join(self._text))])] if self._item_open else []
        return {
            "id": self._head.response_id,
            "object": "response",
            "created_at": self._head.created_s,
            "status": status,
            "model": self._head.model,
            "output": output,
            "usage": None if usage is None else usage.as_event(),
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "max_output_tokens": self._head.max_output_tokens,
            "temperature": self._head.temperature,
            "top_p": self._head.top_p,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "tool_choice": "none",
            "tools": [],
            "metadata": {},
        }

    def _event(self, kind: str, **fields: Any) -> ServerEvent:
        event = {"type": kind, "sequence_number": self._sequence, "stream_id": self._head.stream_id, **fields}
        self._sequence += 1
        return event


def _text_part(text: str) -> ServerEvent:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _item_status(status: str) -> str:
    """Items know fewer states than responses: what did not complete is incomplete."""
    return status if status in ("completed", "in_progress") else "incomplete"
