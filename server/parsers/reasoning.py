"""Tells reasoning from the answer: text up to `</think>`, as Qwen and DeepSeek models write it.

The template may have opened the reasoning in the prompt, or the model opens it itself. Blanks at the marks belong to them. However the
text is cut into pieces, the parts add up to the same. Models forget to close reasoning before a call: it ends where one begins if the
format says so, and else what comes from its mark on is not told before `</think>` or the end of the text says which of both it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import marks
from .tool_calls import CallBegin, ToolCallParser

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class Reasoning:
    """A piece of reasoning."""

    text: str


@dataclass(frozen=True)
class Content:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True)
class Unclosed:
    """What reasoning that was not closed has from the mark of a call on."""

    text: str


Reasoned = Reasoning | Content | Unclosed


class ReasoningParser:
    """One completion's reasoning and answer.

    Args:
        inside: whether the text begins within reasoning; else only where it begins with `<think>`.
        so_far: what the message has before that text, which then goes on where this ends; blank for a message that begins.
        calls: marks that a call begins with, where calls are looked for.
        ends: makes a parser of calls, where one that begins ends reasoning.
    """

    def __init__(self, inside: bool, so_far: str = "", calls: Sequence[str] = (), ends: Callable[[], ToolCallParser] | None = None) -> None:
        self._inside = False
        self._calls, self._ends = tuple(calls), ends
        self._trial: ToolCallParser | None = None
        self._passed = self._tried = 0
        self._pending = ""
        self._step: Callable[[bool], Reasoned | None] = self._at_start
        self.push(so_far)
        self._pending, self._inside = "", inside

    @property
    def inside(self) -> bool:
        """Whether the next text is reasoning, as far as one can tell."""
        return self._step in (self._at_reasoning, self._in_reasoning) or (self._step == self._at_start and self._inside)

    def push(self, text: str) -> list[Reasoned]:
        """The parts that are certain with this text."""
        self._pending += text
        return self._run(final=False)

    def finish(self) -> list[Reasoned]:
        """The rest, at the end of the text."""
        return self._run(final=True)

    def _run(self, final: bool) -> list[Reasoned]:
        parts: list[Reasoned] = []
        while self._pending or final:
            step = self._step
            part = step(final)
            if part is not None and part.text:
                parts.append(part)
            if self._step == step:
                break
        return parts

    def _at_start(self, final: bool) -> Reasoned | None:
        text = self._pending.lstrip()
        if text.startswith(OPEN):
            self._pending = text[len(OPEN) :]
            self._step = self._at_reasoning
        elif final or not OPEN.startswith(text):
            self._step = self._at_reasoning if self._inside else self._in_answer
        return None

    def _at_reasoning(self, final: bool) -> Reasoned | None:
        self._pending = self._pending.lstrip()
        if self._pending or final:
            self._step = self._in_reasoning
        return None

    def _in_reasoning(self, final: bool) -> Reasoned | None:
        text, _, rest = self._pending.partition(CLOSE)
        call = self._mark(text)
        while call is not None and (begins := self._begins(text[call[0] :], call[1])) is not None:
            if begins:
                self._pending = self._pending[call[0] :]
                self._step = self._in_answer
                return Reasoning(text[: call[0]].rstrip())
            self._passed = call[0] + len(call[1])
            call = self._mark(text)
        if len(text) < len(self._pending):
            self._pending = rest
            self._step = self._at_answer
            return Reasoning(text.rstrip())
        end = len(text[: call[0]].rstrip()) if call else len(text) if final else marks.certain(text, [CLOSE, *self._calls])
        self._pending, self._passed = text[end:], max(0, self._passed - end)
        if final and not end and self._pending:
            self._pending = ""
            return Unclosed(text)
        return Reasoning(text[:end])

    def _mark(self, text: str) -> tuple[int, str] | None:
        """The place of the first mark that may begin a call, and the mark."""
        found = marks.first(text[self._passed :], self._calls) if self._calls else None
        return found and (self._passed + found[0], found[1])

    def _begins(self, text: str, mark: str) -> bool | None:
        """Whether a call that ends reasoning begins with a text, of which more may come; None while nothing tells."""
        if self._ends is None:
            return None
        if self._trial is None:
            self._trial, self._tried = self._ends(), 0
        # Before a second mark there is the name of a tool behind the first, or that is none.
        second = text.find(mark, len(mark))
        parts = self._trial.push(text[self._tried : second if second >= 0 else len(text)])
        self._tried = len(text)
        if not parts and second < 0:
            return None
        self._trial = None
        return bool(parts) and isinstance(parts[0], CallBegin)

    def _at_answer(self, final: bool) -> Reasoned | None:
        self._pending = self._pending.lstrip()
        if self._pending or final:
            self._step = self._in_answer
        return None

    def _in_answer(self, _: bool) -> Reasoned | None:
        text, self._pending = self._pending, ""
        return Content(text)


ALWAYS, AS_OPENED = "always", "as opened"

PARSERS = {
    "qwen3": AS_OPENED,
    "deepseek_r1": ALWAYS,
    "deepseek_v3": AS_OPENED,
}
"""Names as vLLM and SGLang have them: whether text begins within reasoning always, unless the prompt has closed it, or only where the
prompt has opened it."""

ALIASES = {
    **dict.fromkeys(("glm45", "kimi_k2", "minimax", "minimax_m2"), "qwen3"),
    **dict.fromkeys(("deepseek-r1", "qwen3-thinking"), "deepseek_r1"),
    **dict.fromkeys(("deepseek-v3", "deepseek_v31"), "deepseek_v3"),
}


def choose(template: str) -> str | None:
    """The parser for a chat template; None where it knows no reasoning."""
    return "qwen3" if CLOSE in template else None


def reasoning_parser(
    name: str, prompt: str, so_far: str = "", calls: Sequence[str] = (), ends: Callable[[], ToolCallParser] | None = None
) -> ReasoningParser:
    """A parser of what a model writes after a prompt.

    Args:
        name: one of PARSERS.
        prompt: that the chat template made.
        so_far: the message that the prompt ends within; blank where it ends before one.
        calls, ends: see `ReasoningParser`.
    """
    return ReasoningParser(begins_inside(name, prompt), so_far, calls, ends)


def begins_inside(name: str, prompt: str) -> bool:
    """Whether text after a prompt begins within reasoning."""
    end = prompt.rstrip()
    return end.endswith(OPEN) or (PARSERS[name] == ALWAYS and not end.endswith(CLOSE))


def names() -> Sequence[str]:
    """Legal names of parsers."""
    return (*PARSERS, *ALIASES)
