"""One completion of a chat: its text as reasoning, content and tool calls."""

from __future__ import annotations

from typing import Any

from ...runtime.request import Logprobs
from ..engine.output_stream import CompletionEnd, TextDelta
from ..parsers.message import MessageParser, Part
from ..parsers.reasoning import Content, Reasoning
from ..parsers.tool_calls import CallArguments, CallBegin, CallEnd, new_call_id
from ..text.logprobs import prompt_entries, token_objects
from ..text.tokenizer import TextTokenizer
from .choices import FINISH_REASONS
from .request_models import ChatRequest


class ChatChoice:
    """One completion. Log probabilities are of all tokens of the text, marks included; they come with the text that they are part of.

    Args:
        parser: of its text.
        body: the request.
        prompt: token ids.
    """

    def __init__(self, index: int, parser: MessageParser, body: ChatRequest, prompt: tuple[int, ...], tokenizer: TextTokenizer) -> None:
        self._index = index
        self._parser = parser
        self._returns_ids = body.return_token_ids
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._begun = False
        self._text: dict[str, list[str]] = {"content": [], "reasoning_content": []}
        self._calls: list[dict[str, Any]] = []
        self._arguments: list[list[str]] = []
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
            message["tool_calls"] = self._whole_calls()
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
                self._begin_call(part.name)
                calls[len(self._calls) - 1] = {**self._calls[-1], "function": {"name": part.name, "arguments": ""}}
            elif isinstance(part, CallArguments):
                self._arguments[-1].append(part.text)
                call = calls.setdefault(len(self._calls) - 1, {"index": len(self._calls) - 1, "function": {"arguments": ""}})
                call["function"]["arguments"] += part.text
            elif isinstance(part, CallEnd):
                self._cut = not part.whole
        texts = {
            "reasoning_content": "".join(part.text for part in parts if isinstance(part, Reasoning)),
            "content": "".join(part.text for part in parts if isinstance(part, Content)),
        }
        fields: dict[str, Any] = {name: text for name, text in texts.items() if text}
        for name, text in fields.items():
            self._text[name].append(text)
        return fields | ({"tool_calls": list(calls.values())} if calls else {})

    def _begin_call(self, name: str) -> None:
        self._calls.append({"index": len(self._calls), "id": new_call_id(), "type": "function", "function": {"name": name}})
        self._arguments.append([])

    def _whole_calls(self) -> list[dict[str, Any]]:
        return [
            {"id": call["id"], "type": "function", "function": {**call["function"], "arguments": "".join(arguments)}}
            for call, arguments in zip(self._calls, self._arguments, strict=True)
        ]

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
