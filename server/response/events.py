"""The server events of one response, in OpenAI's format.

Every event of a response has a `sequence_number` (from 0, without gaps) and a `stream_id`. Extensions: deltas have `token_ids`, log
probabilities `token_id` (see `logprobs`), usage the execution record (see `usage`). A response ends with exactly one of the types in
TERMINAL_TYPES. An `error` event refuses a message and is not part of a response; with status 500 it ends one whose events the server
failed to make.

Reasoning, text and calls of a completion are items of their own. A response with several completions has one output item for each:
`output[i]` is the item of `output_index` i. It ends when all have ended, with the worst of their statuses: failed if one failed, else
cancelled, else incomplete, else completed; each item has its own. When one completion fails the others run to their ends, and their items
are in the output of the failed response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..engine.output_stream import STATUS_BY_REASON, CompletionEnd
from ..requests.error_objects import error_reply, failure_of
from .output_items import EventBody
from .output_writer import OutputWriter
from .usage import usage_object

ServerEvent = dict[str, Any]

TERMINAL_TYPES = tuple(dict.fromkeys(f"response.{status}" for status in STATUS_BY_REASON.values()))


@dataclass(frozen=True)
class ResponseInfo:
    """Fields of a response that its events repeat.

    Attributes:
        created_s: Unix time.
        max_output_tokens: of each completion, with defaults resolved.
        top_logprobs: most likely tokens listed per position.
        stream_id: "" where there is one stream only.
        instructions, metadata, previous_response_id: the request's.
        store, background: whether it is kept, and whether it goes on without a connection.
        tools, tool_choice, parallel_tool_calls, text: as the request has them.
        effort: of reasoning.
        warnings: what of the request its prompt does not have (`requests.left_out`).
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
    previous_response_id: str | None = None
    store: bool = False
    background: bool = False
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    text: Mapping[str, Any] = field(default_factory=lambda: {"format": {"type": "text"}})
    effort: str | None = None
    warnings: Sequence[Mapping[str, str]] = ()


def error_event(error: Exception, *, stream_id: str | None = None) -> ServerEvent:
    """An `error` event; see `errors.error_reply`."""
    reply = error_reply(error)
    event: ServerEvent = {"type": "error", "status": reply.status, "error": reply.as_object()}
    stream_id = stream_id or reply.stream_id
    if stream_id is not None:
        event["stream_id"] = stream_id
    return event


def in_lane(event: ServerEvent, stream_id: str) -> ServerEvent:
    """An event of a response as it is sent in a lane; the lane without a name is ""."""
    if event.get("stream_id", "") == stream_id:
        return event
    others = {name: value for name, value in event.items() if name != "stream_id"}
    return {**others, "stream_id": stream_id} if stream_id else others


def steer_refusal(response_id: str, steer_input: Any) -> ServerEvent:
    """The answer to `response.steer`, in OpenAI's form: what a response runs on is fixed when it starts."""
    message = "responses cannot be steered here; legal is response.cancel, and a response.create that continues it"
    error = {"type": "invalid_request_error", "code": "steering_not_supported", "message": message}
    steer = {"previous_response_id": response_id, "input": steer_input}
    return {"type": "response.steer.failed", "sequence_number": 0, "error": error, "steer": steer}


class ResponseEvents:
    """Builds the events of one response: `begin`, for each item any number of `delta` and one `close`, then one `end`.

    Args:
        info: fields of the response.
        writers: of its completions.
    """

    def __init__(self, info: ResponseInfo, writers: Sequence[OutputWriter]) -> None:
        self._info = info
        self._sequence = 0
        self._last: EventBody | None = None
        self._writers = tuple(writers)
        self._stream = {"stream_id": info.stream_id} if info.stream_id else {}

    def begin(self) -> list[ServerEvent]:
        """The events of an accepted response."""
        response = self._response("in_progress")
        return self._numbered([{"type": "response.created", "response": response}, {"type": "response.in_progress", "response": response}])

    def delta(self, index: int, pieces: Sequence[str], token_ids: Sequence[int], logprobs: Sequence[EventBody] = ()) -> list[ServerEvent]:
        """The events of new text of a completion; see `OutputWriter.write`."""
        return self._numbered(self._writers[index].write(pieces, token_ids, logprobs))

    def close(self, index: int, status: str) -> list[ServerEvent]:
        """The events of a completion's end."""
        return self._numbered(self._writers[index].close(status))

    def snapshot(self) -> EventBody:
        """The response as it is now."""
        return self._last or self._response("in_progress")

    def end(self, ends: Sequence[CompletionEnd]) -> list[ServerEvent]:
        """The last event; `ends` has the end of every item, in their order."""
        status = max((end.status for end in ends), key=list(STATUS_BY_REASON.values()).index, default="completed")
        response = self._last = self._response(status)
        response["usage"] = usage_object([end.usage for end in ends]) if ends else None
        if status == "failed":
            failed = [end.code or "server_error" for end in ends if end.reason == "error"]
            code = failed[0] if failed else "timeout"
            response["error"] = {"code": code, "message": _failure(ends)}
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return self._numbered([{"type": f"response.{status}", "response": response}])

    def fail(self, error: Exception) -> ServerEvent:
        """The last event where the server failed to make others: without output, which may be what cannot be made."""
        response = self._last = self._without_output("failed")
        response["error"] = {"code": "server_error", "message": error_reply(error).message}
        return self._numbered([{"type": "response.failed", "response": response}])[0]

    def _response(self, status: str) -> EventBody:
        return {**self._without_output(status), "output": [item for writer in self._writers for item in writer.objects()]}

    def _without_output(self, status: str) -> EventBody:
        return {
            "id": self._info.response_id,
            "object": "response",
            "created_at": self._info.created_s,
            "status": status,
            "model": self._info.model,
            "output": [],
            "usage": None,
            "error": None,
            "incomplete_details": None,
            "instructions": self._info.instructions,
            "max_output_tokens": self._info.max_output_tokens,
            "temperature": self._info.temperature,
            "top_p": self._info.top_p,
            "top_logprobs": self._info.top_logprobs,
            "parallel_tool_calls": self._info.parallel_tool_calls,
            "previous_response_id": self._info.previous_response_id,
            "tool_choice": self._info.tool_choice,
            "tools": [dict(tool) for tool in self._info.tools],
            "metadata": dict(self._info.metadata),
            "store": self._info.store,
            "background": self._info.background,
            "truncation": "disabled",
            "text": dict(self._info.text),
            "reasoning": {"effort": self._info.effort, "summary": None} if self._info.effort else None,
        } | ({"warnings": list(self._info.warnings)} if self._info.warnings else {})

    def _numbered(self, bodies: list[EventBody]) -> list[ServerEvent]:
        for body in bodies:
            body["sequence_number"] = self._sequence
            body.update(self._stream)
            self._sequence += 1
        return bodies


def _failure(ends: Sequence[CompletionEnd]) -> str:
    messages = {index: failure_of(end.message) for index, end in enumerate(ends) if end.status == "failed"}
    if len(ends) == 1:
        return messages[0]
    return "; ".join(f"output {index} of {len(ends)}: {message}" for index, message in messages.items())
