"""Output items of a response, and their events in OpenAI's format: messages, reasoning, and calls of functions.

An event body is an event without `sequence_number` and `stream_id`, which `events` adds. Items have fewer states than responses: any status
but completed becomes incomplete. Extension: deltas have `token_ids`, the tokens since the last delta of the completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..parsers.custom_input import CustomInput
from ..requests.tool_fields import Declared
from ..text.logprobs import without_bytes

EventBody = dict[str, Any]


class MessageItem:
    """One message: any number of `delta`, then one `close`; the first call opens the item.

    Args:
        item_id: its id.
        index: its position in the response's output.

    Attributes:
        opened: whether its opening events have been returned.
    """

    def __init__(self, item_id: str, index: int) -> None:
        self.opened = False
        self._id = item_id
        self._index = index
        self._text: list[str] = []
        self._logprobs: list[EventBody] = []
        self._status = "in_progress"
        self._delta_header = self._header("response.output_text.delta")

    @property
    def text(self) -> str:
        """Of the message so far."""
        return "".join(self._text)

    def delta(self, text: str, token_ids: Sequence[int], logprobs: Sequence[EventBody]) -> list[EventBody]:
        """The events of new text; `token_ids` are the tokens since the last delta, `logprobs` theirs (`logprobs.token_objects`)."""
        opening = () if self.opened else self._open()
        self._text.append(text)
        self._logprobs += logprobs
        bare = without_bytes(logprobs) if logprobs else []
        return [*opening, {**self._delta_header, "delta": text, "logprobs": bare, "token_ids": list(token_ids)}]

    def close(self, status: str) -> list[EventBody]:
        """The last events."""
        opening = () if self.opened else self._open()
        self._status = _closed(status)
        part = self._part()
        return [
            *opening,
            {**self._header("response.output_text.done"), "text": part["text"], "logprobs": without_bytes(self._logprobs)},
            {**self._header("response.content_part.done"), "part": part},
            {"type": "response.output_item.done", "output_index": self._index, "item": self._object([part])},
        ]

    def as_object(self) -> EventBody:
        """The item as an entry of the response's output."""
        return self._object([self._part()])

    def _open(self) -> list[EventBody]:
        self.opened = True
        return [
            {"type": "response.output_item.added", "output_index": self._index, "item": self._object([])},
            {**self._header("response.content_part.added"), "part": _part("", [])},
        ]

    def _object(self, content: list[EventBody]) -> EventBody:
        return {"id": self._id, "type": "message", "role": "assistant", "status": self._status, "content": content}

    def _part(self) -> EventBody:
        return _part(self.text, list(self._logprobs))

    def _header(self, kind: str) -> EventBody:
        return {"type": kind, "item_id": self._id, "output_index": self._index, "content_index": 0}


class ReasoningOutput:
    """What the model thinks before it answers; it is open from its beginning."""

    def __init__(self, item_id: str, index: int) -> None:
        self._id = item_id
        self._index = index
        self._text: list[str] = []
        self._status = "in_progress"

    @property
    def text(self) -> str:
        """Of the reasoning so far."""
        return "".join(self._text)

    def open(self) -> list[EventBody]:
        """The first events."""
        return [
            {"type": "response.output_item.added", "output_index": self._index, "item": self._object([])},
            {**self._header("response.content_part.added"), "part": {"type": "reasoning_text", "text": ""}},
        ]

    def delta(self, text: str, token_ids: Sequence[int]) -> list[EventBody]:
        """The event of new text."""
        self._text.append(text)
        return [{**self._header("response.reasoning_text.delta"), "delta": text, "token_ids": list(token_ids)}]

    def close(self, status: str) -> list[EventBody]:
        """The last events."""
        self._status = _closed(status)
        part = {"type": "reasoning_text", "text": self.text}
        return [
            {**self._header("response.reasoning_text.done"), "text": self.text},
            {**self._header("response.content_part.done"), "part": part},
            {"type": "response.output_item.done", "output_index": self._index, "item": self.as_object()},
        ]

    def as_object(self) -> EventBody:
        """The item as an entry of the response's output."""
        return self._object([{"type": "reasoning_text", "text": self.text}])

    def _object(self, content: list[EventBody]) -> EventBody:
        return {"id": self._id, "type": "reasoning", "summary": [], "content": content, "status": self._status}

    def _header(self, kind: str) -> EventBody:
        return {"type": kind, "item_id": self._id, "output_index": self._index, "content_index": 0}


class FunctionCallItem:
    """A call of a function; it is open from its beginning.

    Args:
        name: that the prompt has for the function.
        declared: what the client calls it.
    """

    def __init__(self, item_id: str, index: int, call_id: str, name: str, declared: Declared | None = None) -> None:
        self.call_id, self.name = call_id, name
        self._declared = declared or Declared(name)
        self._id = item_id
        self._index = index
        self._arguments: list[str] = []
        self._status = "in_progress"

    @property
    def arguments(self) -> str:
        """Text of the arguments so far."""
        return "".join(self._arguments)

    def open(self) -> list[EventBody]:
        """The first event."""
        return [{"type": "response.output_item.added", "output_index": self._index, "item": self.as_object()}]

    def delta(self, text: str, token_ids: Sequence[int]) -> list[EventBody]:
        """The event of more arguments."""
        self._arguments.append(text)
        return [{**self._header("response.function_call_arguments.delta"), "delta": text, "token_ids": list(token_ids)}]

    def close(self, status: str) -> list[EventBody]:
        """The last events."""
        self._status = _closed(status)
        return [
            {**self._header("response.function_call_arguments.done"), "name": self._declared.name, "arguments": self.arguments},
            {"type": "response.output_item.done", "output_index": self._index, "item": self.as_object()},
        ]

    def as_object(self) -> EventBody:
        """The item as an entry of the response's output."""
        return self._object("function_call", "arguments", self.arguments)

    def _object(self, kind: str, field: str, text: str) -> EventBody:
        call = {"id": self._id, "type": kind, "call_id": self.call_id, "name": self._declared.name, field: text, "status": self._status}
        return call | ({"namespace": self._declared.namespace} if self._declared.namespace else {})

    def _header(self, kind: str) -> EventBody:
        return {"type": kind, "item_id": self._id, "output_index": self._index}


class CustomCallItem(FunctionCallItem):
    """A call of a custom tool: its one argument is its input."""

    def __init__(self, item_id: str, index: int, call_id: str, name: str, declared: Declared) -> None:
        super().__init__(item_id, index, call_id, name, declared)
        self._reader = CustomInput()
        self._input: list[str] = []

    def delta(self, text: str, token_ids: Sequence[int]) -> list[EventBody]:
        """The event of more input."""
        self._arguments.append(text)
        self._input.append(self._reader.push(text))
        header = self._header("response.custom_tool_call_input.delta")
        return [{**header, "delta": self._input[-1], "token_ids": list(token_ids)}] if self._input[-1] else []

    def close(self, status: str) -> list[EventBody]:
        """The last events."""
        self._status = _closed(status)
        self._input.append(self._reader.finish())
        rest = {**self._header("response.custom_tool_call_input.delta"), "delta": self._input[-1], "token_ids": []}
        return [
            *([rest] if rest["delta"] else []),
            {**self._header("response.custom_tool_call_input.done"), "input": "".join(self._input)},
            {"type": "response.output_item.done", "output_index": self._index, "item": self.as_object()},
        ]

    def as_object(self) -> EventBody:
        """The item as an entry of the response's output."""
        return self._object("custom_tool_call", "input", "".join(self._input))


def _closed(status: str) -> str:
    return "completed" if status == "completed" else "incomplete"


def _part(text: str, logprobs: list[EventBody]) -> EventBody:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
