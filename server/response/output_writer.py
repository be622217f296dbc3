"""The output of one completion as items: one message, or what a parser finds in its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ..parsers.message import MessageParser, Part
from ..parsers.reasoning import Content, Reasoning
from ..parsers.tool_calls import CallArguments, CallBegin, CallEnd, new_call_id
from ..requests.items import CallItem, ChatMessage, Item
from ..requests.items import ReasoningItem as ReasoningInput
from ..requests.tool_fields import Declared
from .output_items import CustomCallItem, EventBody, FunctionCallItem, MessageItem, ReasoningOutput


class OutputWriter(Protocol):
    """One completion's items."""

    reasoning_tokens: int

    def write(self, pieces: Sequence[str], token_ids: Sequence[int], logprobs: Sequence[EventBody]) -> list[EventBody]:
        """The events of new text.

        Args:
            pieces: of the text: what each token completed, or all of it.
            token_ids: the tokens.
            logprobs: theirs.
        """

    def close(self, status: str) -> list[EventBody]:
        """The last events of the completion."""

    def objects(self) -> list[EventBody]:
        """The items as entries of the response's output."""

    def items(self) -> tuple[Item, ...]:
        """The items as the input of a later turn."""


class TextWriter:
    """The whole text is one message.

    Args:
        message: its item.
        alone: whether the response has no other, which then has no item at all where it ended early without text.
    """

    reasoning_tokens = 0

    def __init__(self, message: MessageItem, alone: bool) -> None:
        self._message = message
        self._alone = alone

    def write(self, pieces: Sequence[str], token_ids: Sequence[int], logprobs: Sequence[EventBody]) -> list[EventBody]:
        """See `OutputWriter`."""
        return self._message.delta("".join(pieces), token_ids, logprobs)

    def close(self, status: str) -> list[EventBody]:
        """See `OutputWriter`."""
        if status != "completed" and not self._message.opened and self._alone:
            return []
        return self._message.close(status)

    def objects(self) -> list[EventBody]:
        """See `OutputWriter`."""
        return [self._message.as_object()] if self._message.opened else []

    def items(self) -> tuple[Item, ...]:
        """See `OutputWriter`."""
        return (ChatMessage("assistant", self._message.text),) if self._message.text else ()


OpenItem = MessageItem | ReasoningOutput | FunctionCallItem


class PartsWriter:
    """Reasoning, text and calls are items of their own, one after another.

    Log probabilities of a message are those of its tokens, and of marks that came with them.

    Args:
        base: what ids of items end in.
        declared: what the client calls functions that are none to it.
    """

    def __init__(self, base: str, parser: MessageParser, declared: Mapping[str, Declared] | None = None) -> None:
        self.reasoning_tokens = 0
        self._declared = declared or {}
        self._base = base
        self._parser = parser
        self._items: list[OpenItem] = []
        self._open: OpenItem | None = None
        # What has come and not been sent: parsers hold text back.
        self._token_ids: list[int] = []
        self._logprobs: list[EventBody] = []

    def write(self, pieces: Sequence[str], token_ids: Sequence[int], logprobs: Sequence[EventBody]) -> list[EventBody]:
        """See `OutputWriter`."""
        self._token_ids += token_ids
        self._logprobs += logprobs
        parts: list[Part] = []
        each = len(pieces) == len(token_ids)
        for piece in pieces:
            reasoned = self._parser.reasoning
            new = self._parser.push(piece)
            if reasoned or self._parser.reasoning or any(isinstance(part, Reasoning) for part in new):
                self.reasoning_tokens += 1 if each else len(token_ids)
            parts = _joined(parts, new)
        events = [event for part in parts for event in self._part(part)]
        if self._parser.reasoning or isinstance(self._open, FunctionCallItem):
            self._logprobs.clear()
        return events

    def close(self, status: str) -> list[EventBody]:
        """See `OutputWriter`."""
        # A call that has no end ends as the completion does.
        events = [event for part in self._parser.finish() for event in self._part(part, status)]
        if not self._items and status == "completed":
            self._message()
        return events + self._close(status)

    def objects(self) -> list[EventBody]:
        """See `OutputWriter`."""
        return [item.as_object() for item in self._items]

    def items(self) -> tuple[Item, ...]:
        """See `OutputWriter`."""
        return tuple(map(_as_input, self._items))

    def _part(self, part: Part, status: str = "completed") -> list[EventBody]:
        match part:
            case Reasoning(text):
                events = self._begin(ReasoningOutput) if not isinstance(self._open, ReasoningOutput) else []
                assert isinstance(self._open, ReasoningOutput)
                return [*events, *self._open.delta(text, self._take_ids())]
            case Content(text):
                events = [] if isinstance(self._open, MessageItem) else self._close("completed")
                message = self._open if isinstance(self._open, MessageItem) else self._message()
                return [*events, *message.delta(text, self._take_ids(), self._take_logprobs())]
            case CallBegin(name, call_id):
                events = self._close("completed")
                shown = self._declared.get(name, Declared(name))
                kind, mark = (CustomCallItem, "ctc") if shown.custom else (FunctionCallItem, "fc")
                call = kind(self._id(mark), len(self._items), call_id or new_call_id(), name, shown)
                self._add(call)
                return [*events, *call.open()]
            case CallArguments(text):
                assert isinstance(self._open, FunctionCallItem)
                return self._open.delta(text, self._take_ids())
            case CallEnd(whole):
                return self._close(status if whole else "incomplete")

    def _begin(self, kind: type[ReasoningOutput]) -> list[EventBody]:
        events = self._close("completed")
        item = kind(self._id("rs"), len(self._items))
        self._add(item)
        return [*events, *item.open()]

    def _message(self) -> MessageItem:
        message = MessageItem(self._id("msg"), len(self._items))
        self._add(message)
        return message

    def _add(self, item: OpenItem) -> None:
        self._items.append(item)
        self._open = item

    def _close(self, status: str) -> list[EventBody]:
        item, self._open = self._open, None
        return item.close(status) if item is not None else []

    def _take_ids(self) -> list[int]:
        taken, self._token_ids = self._token_ids, []
        return taken

    def _take_logprobs(self) -> list[EventBody]:
        taken, self._logprobs = self._logprobs, []
        return taken

    def _id(self, kind: str) -> str:
        return f"{kind}_{self._base}_{len(self._items)}" if self._items else f"{kind}_{self._base}"


def _joined(parts: list[Part], more: Sequence[Part]) -> list[Part]:
    """Parts of one text after those of the text before it; what goes on is one part."""
    if parts and more and type(parts[-1]) is type(more[0]):
        match parts[-1], more[0]:
            case (Reasoning(text), Reasoning(rest)):
                return [*parts[:-1], Reasoning(text + rest), *more[1:]]
            case (Content(text), Content(rest)):
                return [*parts[:-1], Content(text + rest), *more[1:]]
            case (CallArguments(text), CallArguments(rest)):
                return [*parts[:-1], CallArguments(text + rest), *more[1:]]
    return [*parts, *more]


def _as_input(item: OpenItem) -> Item:
    if isinstance(item, ReasoningOutput):
        return ReasoningInput(item.text)
    if isinstance(item, MessageItem):
        return ChatMessage("assistant", item.text)
    return CallItem(item.call_id, item.name, item.arguments)
