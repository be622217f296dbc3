"""Turns the progress of one output item into bodies of events in OpenAI's shapes.

A body is an event without the number and the stream that `events` gives to all of a response.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .logprobs import without_bytes

Body = dict[str, Any]


class OutputItem:
    """One message of a response: any number of `delta`, then one `close`; whichever comes first opens it.

    Args:
        index: its place in the response's output.

    Attributes:
        opened: it exists for the client.
    """

    def __init__(self, item_id: str, index: int) -> None:
        self.opened = False
        self._id = item_id
        self._index = index
        self._text: list[str] = []
        self._logprobs: list[Body] = []
        self._status = "in_progress"

    def delta(self, text: str, token_ids: Sequence[int], logprobs: Sequence[Body]) -> list[Body]:
        """Text is safe to show; `token_ids` are the tokens taken since the last delta, `logprobs` theirs (`logprobs.token_objects`)."""
        opening = self._open()
        self._text.append(text)
        self._logprobs += logprobs
        body = {
            **self._place("response.output_text.delta"),
            "delta": text,
            "logprobs": without_bytes(logprobs),
            "token_ids": list(token_ids),
        }
        return [*opening, body]

    def close(self, status: str) -> list[Body]:
        """The last events. Items know fewer states than responses: what did not complete is incomplete."""
        opening = self._open()
        self._status = "completed" if status == "completed" else "incomplete"
        part = self._part()
        return [
            *opening,
            {**self._place("response.output_text.done"), "text": part["text"], "logprobs": without_bytes(self._logprobs)},
            {**self._place("response.content_part.done"), "part": part},
            {"type": "response.output_item.done", "output_index": self._index, "item": self._object([part])},
        ]

    def as_object(self) -> Body:
        """The item as it stands in the response's output."""
        return self._object([self._part()])

    def _open(self) -> list[Body]:
        if self.opened:
            return []
        self.opened = True
        return [
            {"type": "response.output_item.added", "output_index": self._index, "item": self._object([])},
            {**self._place("response.content_part.added"), "part": _part("", [])},
        ]

    def _object(self, content: list[Body]) -> Body:
        return {"id": self._id, "type": "message", "role": "assistant", "status": self._status, "content": content}

    def _part(self) -> Body:
        return _part("".join(self._text), list(self._logprobs))

    def _place(self, kind: str) -> Body:
        return {"type": kind, "item_id": self._id, "output_index": self._index, "content_index": 0}


def _part(text: str, logprobs: list[Body]) -> Body:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
