"""A completion as blocks of Anthropic's messages: thinking, text and calls, whole or as events."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from ..engine.generation import Output
from ..engine.output_stream import CompletionEnd, Usage
from ..openai.choices import pieces
from ..openai.sse import Frames, frame
from ..parsers.message import MessageParser, Part
from ..parsers.reasoning import Content, Reasoning
from ..parsers.tool_calls import CallArguments, CallBegin, CallEnd
from ..requests.error_objects import failure_of
from .errors import error_object

Event = dict[str, Any]

REASONS = {"stop": "end_turn", "length": "max_tokens"}
"""Their stop reasons for the engine's finish reasons. They have none for a request that was aborted, nor for one that ran out of time: both
are errors, as what has come might be taken for a whole answer."""


class Blocks:
    """The content of one message, which grows.

    Attributes:
        content: its blocks, so far.
    """

    def __init__(self, parser: MessageParser) -> None:
        self.content: list[dict[str, Any]] = []
        self._parser = parser
        self._open = ""
        self._blank = ""
        self._arguments: list[str] = []
        self._cut = False

    def push(self, text: str) -> Iterator[Event]:
        """Events of new text."""
        return self._events(self._parser.push(text))

    def finish(self) -> Iterator[Event]:
        """Events of the rest, and the end of the last block."""
        yield from self._events(self._parser.finish())
        yield from self._close()

    def reason(self, end: CompletionEnd) -> tuple[str, str | None]:
        """`stop_reason` and `stop_sequence`."""
        if end.stopped_by is not None:
            return "stop_sequence", end.stopped_by
        called = any(block["type"] == "tool_use" for block in self.content) and not self._cut
        return ("tool_use" if called and end.reason == "stop" else REASONS[end.reason]), None

    def _events(self, parts: Sequence[Part]) -> Iterator[Event]:
        for part in parts:
            if isinstance(part, Reasoning):
                yield from self._grow("thinking", part.text, {"type": "thinking", "thinking": "", "signature": ""})
            elif isinstance(part, Content):
                yield from self._grow("text", part.text, {"type": "text", "text": ""})
            elif isinstance(part, CallBegin):
                yield from self._begin("tool_use", {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex}", "name": part.name, "input": {}})
                self._arguments = []
            elif isinstance(part, CallArguments):
                self._arguments.append(part.text)
                yield self._delta({"type": "input_json_delta", "partial_json": part.text})
            elif isinstance(part, CallEnd):
                self._cut = not part.whole
                yield from self._close()

    def _grow(self, kind: str, text: str, empty: dict[str, Any]) -> Iterator[Event]:
        if self._open != kind:
            # A block of white space alone, as stands between calls, is none: their API takes none back.
            self._blank += text
            if not self._blank.strip():
                return
            text, self._blank = self._blank.lstrip(), ""
            yield from self._begin(kind, empty)
        self.content[-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _begin(self, kind: str, block: dict[str, Any]) -> Iterator[Event]:
        yield from self._close()
        self._open, self._blank = kind, ""
        self.content.append(block)
        yield {"type": "content_block_start", "index": len(self.content) - 1, "content_block": dict(block)}

    def _close(self) -> Iterator[Event]:
        if not self._open:
            return
        if self._open == "tool_use":
            self.content[-1]["input"] = _object("".join(self._arguments))
        self._open = ""
        yield {"type": "content_block_stop", "index": len(self.content) - 1}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}


class MessageFrames(Frames[Output]):
    """The events of a streamed message.

    Args:
        header: the message before it has any content.
    """

    def __init__(self, header: dict[str, Any], blocks: Blocks) -> None:
        self._header, self._blocks = header, blocks
        self._end: CompletionEnd | None = None

    def begin(self) -> list[bytes]:
        return [_frame({"type": "message_start", "message": self._header}), _frame({"type": "ping"})]

    def feed(self, outputs: Sequence[Output]) -> list[bytes]:
        frames: list[bytes] = []
        for _, delta, end in pieces(outputs):
            frames += map(_frame, self._blocks.push(delta.text) if delta else ())
            if end is not None and end.reason not in REASONS:
                self.failed = True
                return [*frames, _frame(error_object(504 if end.reason == "timeout" else 500, why_cut(end)))]
            self._end = end or self._end
        return frames

    def end(self) -> list[bytes]:
        assert self._end is not None
        last = [*self._blocks.finish()]
        reason, sequence = self._blocks.reason(self._end)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        usage = usage_object(self._end.usage)
        return [*map(_frame, last), _frame({"type": "message_delta", "delta": delta, "usage": usage}), _frame({"type": "message_stop"})]

    def fault(self, error: Exception) -> list[bytes]:
        return [_frame(error_object(500, "the server failed to make the rest of this message; its log has the reason"))]


def why_cut(end: CompletionEnd) -> str:
    """What is said of a completion whose end is none of the model's."""
    return "the request was aborted" if end.reason == "cancelled" else failure_of(end.message)


def usage_object(usage: Usage) -> dict[str, int]:
    """Tokens of a message; those of the prompt that were found in the caches are counted apart."""
    cached = usage.record.cached_tokens
    return {
        "input_tokens": usage.input_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.output_tokens,
    }


def _object(arguments: str) -> dict[str, Any]:
    """The arguments of a call; nothing of those that were cut."""
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _frame(event: Event) -> bytes:
    return frame(event, event["type"])
