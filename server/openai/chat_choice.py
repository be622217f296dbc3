"""One completion of a chat: its text as reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...runtime.request import Logprobs
from ..engine.output_stream import CompletionEnd, TextDelta
from ..parsers.custom_input import CustomInput
from ..parsers.message import MessageParser, Part
from ..parsers.reasoning import Content, Reasoning
from ..parsers.tool_calls import CallArguments, CallBegin, CallEnd, new_call_id
from ..requests.tool_fields import Declared
from ..text.logprobs import prompt_entries, token_objects
from ..text.tokenizer import TextTokenizer
from .choices import FINISH_REASONS
from .request_models import ChatRequest


class _Call:
    """A call of a function, or of a custom tool, whose one argument is its input."""

    def __init__(self, call_id: str, declared: Declared) -> None:
        self.text: list[str] = []
        self.kind, self.field = ("custom", "input") if declared.custom else ("function", "arguments")
        self._reader = CustomInput() if declared.custom else None
        self._id, self._name = call_id, declared.name

    def push(self, arguments: str) -> str:
        return self._add(self._reader.push(arguments) if self._reader else arguments)

    def finish(self) -> str:
        return self._add(self._reader.finish() if self._reader else "")

    def object(self, text: str) -> dict[str, Any]:
        return {"id": self._id, "type": self.kind, self.kind: {"name": self._name, self.field: text}}

    def _add(self, text: str) -> str:
        self.text.append(text)
        return text


class ChatChoice:
    """One completion. Log probabilities are of all tokens of the text, marks included; they come with the text that they are part of.

    Args:
        parser: of its text.
        body: the request.
        prompt: token ids.
        declared: what the client calls functions that are none to it.
    """

    def __init__(
        self,
        index: int,
        parser: MessageParser,
        body: ChatRequest,
        prompt: tuple[int, ...],
        tokenizer: TextTokenizer,
        declared: Mapping[str, Declared] | None = None,
    ) -> None:
        self._index = index
        self._declared = declared or {}
        self._parser = parser
        self._returns_ids = body.return_token_ids
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._begun = False
        self._text: dict[str, list[str]] = {"content": [], "reasoning_content": []}
        self._calls: list[_Call] = []
        self._cut = False
        self._logprobs: list[dict[str, Any]] | None = [] if body.logprobs else None
        self._ids: list[int] = []
        self._finish_reason: str | None = None
        # What has come and not been sent: parsers hold text back.
        self._held_logprobs: list[dict[str, Any]] = []
        self._held_ids: list[int] = []
        self._prompt_logprobs: tuple[Logprobs, ...] = ()

    def chunk(self, delta: TextDelta | None, end: CompletionEnd | None) -> dict[str, Any] | None:
        parts = self._parser.push(delta.text) if delta else []
        if end:
            parts += self._parser.finish()
        if delta:
            self._prompt_logprobs += delta.prompt_logprobs
            self._held_ids += delta.token_ids
            self._held_logprobs += token_objects(self._tokenizer.token_text, delta.token_ids, delta.logprobs) if delta.logprobs else []
        fields = self._fields(parts)
        if end:
            self._finish_reason = self._reason(end)
        elif not fields:
            return None
        first, self._begun = not self._begun, True
        message = {"role": "assistant", "content": "", **fields} if first else fields
        logprobs, ids = self._take_held()
        choice = {"index": self._index, "delta": message, "logprobs": logprobs, "finish_reason": self._finish_reason}
        return choice | ({"token_ids": ids} | ({"prompt_token_ids": self._prompt} if first else {}) if self._returns_ids else {})

    def whole(self) -> dict[str, Any]:
        content, reasoning = ("".join(self._text[name]) for name in ("content", "reasoning_content"))
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if self._calls else "")}
        if reasoning:
            message["reasoning_content"] = reasoning
        if self._calls:
            message["tool_calls"] = [call.object("".join(call.text)) for call in self._calls]
        logprobs = None if self._logprobs is None else {"content": self._logprobs, "refusal": None}
        choice = {"index": self._index, "message": message, "logprobs": logprobs, "finish_reason": self._finish_reason}
        return choice | ({"token_ids": self._ids, "prompt_token_ids": self._prompt} if self._returns_ids else {})

    def prompt_logprobs(self, most: int) -> list[dict[str, dict[str, Any]] | None]:
        """Those of the prompt, with so many of the most likely tokens at each position."""
        return prompt_entries(self._tokenizer.token_text, self._prompt, self._prompt_logprobs, most)

    def _fields(self, parts: list[Part]) -> dict[str, Any]:
        """The new parts of the message."""
        calls: dict[int, dict[str, Any]] = {}
        for part in parts:
            if isinstance(part, CallBegin):
                self._calls.append(_Call(part.call_id or new_call_id(), self._declared.get(part.name, Declared(part.name))))
                calls[len(self._calls) - 1] = {"index": len(self._calls) - 1, **self._calls[-1].object("")}
            elif isinstance(part, CallArguments | CallEnd):
                call = self._calls[-1]
                text = call.push(part.text) if isinstance(part, CallArguments) else call.finish()
                self._cut = isinstance(part, CallEnd) and not part.whole
                if text:
                    index = len(self._calls) - 1
                    new = calls.setdefault(index, {"index": index, call.kind: {call.field: ""}})
                    new[call.kind][call.field] += text
        texts = {
            "reasoning_content": "".join(part.text for part in parts if isinstance(part, Reasoning)),
            "content": "".join(part.text for part in parts if isinstance(part, Content)),
        }
        fields: dict[str, Any] = {name: text for name, text in texts.items() if text}
        for name, text in fields.items():
            self._text[name].append(text)
        return fields | ({"tool_calls": list(calls.values())} if calls else {})

    def _reason(self, end: CompletionEnd) -> str | None:
        # A call that a stop string cut is not to be run.
        called = bool(self._calls) and not self._cut
        return "tool_calls" if called and end.reason == "stop" else FINISH_REASONS.get(end.reason)

    def _take_held(self) -> tuple[dict[str, Any] | None, list[int]]:
        logprobs, self._held_logprobs = self._held_logprobs, []
        ids, self._held_ids = self._held_ids, []
        self._ids += ids
        if self._logprobs is None:
            return None, ids
        self._logprobs += logprobs
        return {"content": logprobs, "refusal": None}, ids
