"""Output items of a response, and their events in OpenAI's format.

An event body is an event without `sequence_number` and `stream_id`, which `events` adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .logprobs import without_bytes

EventBody = dict[str, Any]


class OutputItem:
    """One message of a response: any number of `delta`, then one `close`; the first call opens the item.

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

    def delta(self, text: str, token_ids: Sequence[int], logprobs: Sequence[EventBody]) -> list[EventBody]:
        """The events of new text; `token_ids` are the tokens since the last delta, `logprobs` theirs (`logprobs.token_objects`)."""
        opening = self._open()
        self._text.append(text)
        self._logprobs += logprobs
        body = {
            **self._header("response.output_text.delta"),
            "delta": text,
            "logprobs": without_bytes(logprobs),
            "token_ids": list(token_ids),
        }
        return [*opening, body]

    def close(self, status: str) -> list[EventBody]:
        """The last events. Items have fewer states than responses: any status but completed becomes incomplete."""
        opening = self._open()
        self._status = "completed" if status == "completed" else "incomplete"
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
        if self.opened:
            return []
        self.opened = True
        return [
            {"type": "response.output_item.added", "output_index": self._index, "item": self._object([])},
            {**self._header("response.content_part.added"), "part": _part("", [])},
        ]

    def _object(self, content: list[EventBody]) -> EventBody:
        return {"id": self._id, "type": "message", "role": "assistant", "status": self._status, "content": content}

    def _part(self) -> EventBody:
        return _part("".join(self._text), list(self._logprobs))

    def _header(self, kind: str) -> EventBody:
        return {"type": kind, "item_id": self._id, "output_index": self._index, "content_index": 0}


def _part(text: str, logprobs: list[EventBody]) -> EventBody:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
