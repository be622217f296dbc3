"""The server events of one response, in OpenAI's format.

Every event of a response has a `sequence_number` (from 0, without gaps) and a `stream_id`. Extensions: deltas have `token_ids`, log
probabilities `token_id` (see `logprobs`), usage the execution record (see `usage`). A response ends with exactly one of the types in
TERMINAL_TYPES. An `error` event refuses a message; it is not part of a response and never ends one.

A response with several completions has an output item for each: `output[i]` is the item of `output_index` i. It ends when all have ended,
with the worst of their statuses: failed if one failed, else cancelled, else incomplete, else completed; each item has its own. When one
completion fails the others run to their ends, and their items are in the output of the failed response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import error_reply, failure_of
from .output_items import EventBody, OutputItem
from .usage import Usage, usage_object

ServerEvent = dict[str, Any]

STATUS_BY_REASON: Mapping[str, str] = {
    "stop": "completed",
    "length": "incomplete",
    "cancelled": "cancelled",
    "timeout": "failed",
    "error": "failed",
}
"""Engine finish reason to response status, best status first; the last event of a response is `response.<status>`."""

TERMINAL_TYPES = tuple(dict.fromkeys(f"response.{status}" for status in STATUS_BY_REASON.values()))


@dataclass(frozen=True)
class ResponseInfo:
    """Fields of a response that its events repeat.

    Attributes:
        created_s: Unix time.
        max_output_tokens: of each completion, with defaults resolved.
        top_logprobs: most likely tokens listed per position.
        stream_id: "" where there is one stream only.
        instructions, metadata: the request's.
    """

    response_id: str
    stream_id: str
    model: str
    created_s: int
    max_output_tokens: int
    temperature: float
    top_p: float
    top_logprobs: int = 0
    instructions: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CompletionEnd:
    """How one completion ended.

    Attributes:
        reason: one of runtime.request.FINISH_REASONS.
        message: the error, for the reasons "error" and "timeout".
    """

    reason: str
    usage: Usage
    message: str | None = None

    @property
    def status(self) -> str:
        """Status of a response whose only completion ended so."""
        return STATUS_BY_REASON[self.reason]


def error_event(error: Exception, *, stream_id: str | None = None) -> ServerEvent:
    """An `error` event; see `errors.error_reply`."""
    reply = error_reply(error)
    event: ServerEvent = {"type": "error", "status": reply.status, "error": reply.as_object()}
    stream_id = stream_id or reply.stream_id
    if stream_id is not None:
        event["stream_id"] = stream_id
    return event


class ResponseEvents:
    """Builds the events of one response: `begin`, for each item any number of `delta` and one `close`, then one `end`.

    Args:
        info: fields of the response.
        completions: number of output items.
    """

    def __init__(self, info: ResponseInfo, completions: int = 1) -> None:
        self._info = info
        self._sequence = 0
        base = "msg_" + info.response_id.removeprefix("resp_")
        self._items = tuple(OutputItem(completion_id(base, index), index) for index in range(completions))

    def begin(self) -> list[ServerEvent]:
        """The events of an accepted response."""
        response = self._response("in_progress")
        return self._numbered([{"type": "response.created", "response": response}, {"type": "response.in_progress", "response": response}])

    def delta(self, index: int, text: str, token_ids: Sequence[int], logprobs: Sequence[EventBody] = ()) -> list[ServerEvent]:
        """The events of new text of an item; see `OutputItem.delta`."""
        return self._numbered(self._items[index].delta(text, token_ids, logprobs))

    def close(self, index: int, status: str) -> list[ServerEvent]:
        """The events of an item's end; none for a single completion that ended early and never had an item."""
        item = self._items[index]
        if status != "completed" and not item.opened and len(self._items) == 1:
            return []
        return self._numbered(item.close(status))

    def end(self, ends: Sequence[CompletionEnd]) -> list[ServerEvent]:
        """The last event; `ends` has the end of every item, in their order."""
        status = max((end.status for end in ends), key=list(STATUS_BY_REASON.values()).index)
        response = self._response(status)
        response["usage"] = usage_object([end.usage for end in ends])
        if status == "failed":
            code = "server_error" if any(end.reason == "error" for end in ends) else "timeout"
            response["error"] = {"code": code, "message": _failure(ends)}
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return self._numbered([{"type": f"response.{status}", "response": response}])

    def _response(self, status: str) -> EventBody:
        return {
            "id": self._info.response_id,
            "object": "response",
            "created_at": self._info.created_s,
            "status": status,
            "model": self._info.model,
            "output": [item.as_object() for item in self._items if item.opened],
            "usage": None,
            "error": None,
            "incomplete_details": None,
            "instructions": self._info.instructions,
            "max_output_tokens": self._info.max_output_tokens,
            "temperature": self._info.temperature,
            "top_p": self._info.top_p,
            "top_logprobs": self._info.top_logprobs,
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "tool_choice": "none",
            "tools": [],
            "metadata": dict(self._info.metadata),
            "store": False,
            "background": False,
            "truncation": "disabled",
            "text": {"format": {"type": "text"}},
            "reasoning": None,
        }

    def _numbered(self, bodies: Sequence[EventBody]) -> list[ServerEvent]:
        first, self._sequence = self._sequence, self._sequence + len(bodies)
        stream = {"stream_id": self._info.stream_id} if self._info.stream_id else {}
        return [{"type": body["type"], "sequence_number": number, **stream, **body} for number, body in enumerate(bodies, first)]


def completion_id(base: str, index: int) -> str:
    """Id of a completion; the first has the id of its response."""
    return base if index == 0 else f"{base}_{index}"


def _failure(ends: Sequence[CompletionEnd]) -> str:
    messages = {index: failure_of(end.message) for index, end in enumerate(ends) if end.status == "failed"}
    if len(ends) == 1:
        return messages[0]
    return "; ".join(f"output {index} of {len(ends)}: {message}" for index, message in messages.items())
