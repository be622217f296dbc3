"""Turns the progress of one response into server events in OpenAI's shapes.

Every event of a response carries `sequence_number` (from 0, without gaps) and `stream_id`. Extensions: deltas carry `token_ids`, log
probabilities `token_id` (see `logprobs`), usage the execution record (see `usage`). A response ends with exactly one of the types in
TERMINAL_TYPES. An `error` event refuses a message; it is not part of a response and never ends one.

A response of several completions has an item for each, whatever became of it: `output[i]` is the item of `output_index` i. It ends when all
have ended, as the worst of them did: failed if one failed, else cancelled, else incomplete, else completed; the items say which. Those
that did not fail run to their own ends, and their items are in the output of the failed response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..graphs.errors import ProtocolError, RequestError
from .connection import refusal
from .output_items import Body, OutputItem
from .usage import Usage, usage_object

ServerEvent = dict[str, Any]

STATUS_BY_REASON: Mapping[str, str] = {"stop": "completed", "length": "incomplete", "cancelled": "cancelled", "error": "failed"}
"""Engine finish reason to response status, from best to worst; the last event of a response is `response.<status>`."""

TERMINAL_TYPES = tuple(f"response.{status}" for status in STATUS_BY_REASON.values())


@dataclass(frozen=True)
class Head:
    """What every event of a response repeats.

    Attributes:
        created_s: Unix time.
        max_output_tokens: of each completion, as in force, defaults resolved.
        top_logprobs: most likely tokens told per place.
    """

    response_id: str
    stream_id: str
    model: str
    created_s: int
    max_output_tokens: int
    temperature: float
    top_p: float
    top_logprobs: int = 0


@dataclass(frozen=True)
class Ending:
    """How one completion ended.

    Attributes:
        reason: one of runtime.request.FINISH_REASONS.
        message: what went wrong, for reason "error".
    """

    reason: str
    usage: Usage
    message: str | None = None

    @property
    def status(self) -> str:
        """What that makes of a response."""
        return STATUS_BY_REASON[self.reason]


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
    """Numbers and shapes the events of one response: `begin`, for each item any number of `delta` and one `close`, then one `end`.

    Args:
        completions: items the response has.
    """

    def __init__(self, head: Head, completions: int = 1) -> None:
        self._head = head
        self._sequence = 0
        base = "msg_" + head.response_id.removeprefix("resp_")
        self._items = tuple(OutputItem(completion_id(base, index), index) for index in range(completions))

    def begin(self) -> list[ServerEvent]:
        """The response is accepted."""
        response = self._response("in_progress")
        return self._numbered([{"type": "response.created", "response": response}, {"type": "response.in_progress", "response": response}])

    def delta(self, index: int, text: str, token_ids: Sequence[int], logprobs: Sequence[Body] = ()) -> list[ServerEvent]:
        """Text of an item is safe to show; see `OutputItem.delta`."""
        return self._numbered(self._items[index].delta(text, token_ids, logprobs))

    def close(self, index: int, status: str) -> list[ServerEvent]:
        """An item has ended; the item of a single completion that ended early, before it began, does not come to be."""
        item = self._items[index]
        if status != "completed" and not item.opened and len(self._items) == 1:
            return []
        return self._numbered(item.close(status))

    def end(self, endings: Sequence[Ending]) -> list[ServerEvent]:
        """The last event; `endings` are those of all items, in their order."""
        status = max((one.status for one in endings), key=list(STATUS_BY_REASON.values()).index)
        response = self._response(status)
        response["usage"] = usage_object([one.usage for one in endings])
        if status == "failed":
            response["error"] = {"code": "server_error", "message": _failure(endings)}
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return self._numbered([{"type": f"response.{status}", "response": response}])

    def _response(self, status: str) -> Body:
        return {
            "id": self._head.response_id,
            "object": "response",
            "created_at": self._head.created_s,
            "status": status,
            "model": self._head.model,
            "output": [item.as_object() for item in self._items if item.opened],
            "usage": None,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "max_output_tokens": self._head.max_output_tokens,
            "temperature": self._head.temperature,
            "top_p": self._head.top_p,
            "top_logprobs": self._head.top_logprobs,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "tool_choice": "none",
            "tools": [],
            "metadata": {},
        }

    def _numbered(self, bodies: Sequence[Body]) -> list[ServerEvent]:
        first, self._sequence = self._sequence, self._sequence + len(bodies)
        place = {"stream_id": self._head.stream_id}
        return [{"type": body["type"], "sequence_number": number, **place, **body} for number, body in enumerate(bodies, first)]


def completion_id(base: str, index: int) -> str:
    """The name of one completion of what `base` names; the first has that name itself."""
    return base if index == 0 else f"{base}_{index}"


def _failure(endings: Sequence[Ending]) -> str:
    told = {index: one.message or "the engine gave no reason" for index, one in enumerate(endings) if one.reason == "error"}
    if len(endings) == 1:
        return told[0]
    return "; ".join(f"output {index} of {len(endings)}: {message}" for index, message in told.items())
