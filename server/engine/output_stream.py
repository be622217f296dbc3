"""The output of one completion: text that is final, with its tokens, log probabilities and stop strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...runtime.request import ExecutionRecord, FinishEvent, Logprobs, TokenEvent
from ..text.tokenizer import Detokenizer, StopMatcher

STATUS_BY_REASON: Mapping[str, str] = {
    "stop": "completed",
    "length": "incomplete",
    "cancelled": "cancelled",
    "timeout": "failed",
    "error": "failed",
}
"""Engine finish reason to response status, best status first; the last event of a response is `response.<status>`."""


@dataclass(frozen=True)
class Usage:
    """Token counts and execution record of a completion; reasoning is part of the output, places of pictures are part of the input."""

    input_tokens: int
    output_tokens: int
    record: ExecutionRecord
    reasoning_tokens: int = 0
    image_tokens: int = 0


@dataclass(frozen=True)
class CompletionEnd:
    """How one completion ended.

    Attributes:
        reason: one of runtime.request.FINISH_REASONS.
        message: the error, for the reasons "error" and "timeout".
        code: of an error that is the request's own.
        ended_by: see runtime.request.FinishEvent.
        stopped_by: the stop string that ended it.
    """

    reason: str
    usage: Usage
    message: str | None = None
    ended_by: tuple[int, Logprobs] | None = None
    code: str | None = None
    stopped_by: str | None = None

    @property
    def status(self) -> str:
        """Status of a response whose only completion ended so."""
        return STATUS_BY_REASON[self.reason]


class TextDelta(NamedTuple):
    """Text that later tokens cannot change. A named tuple, because every event of every stream makes one.

    Attributes:
        token_ids: tokens since the previous delta.
        pieces: the text that each of them completed, where that is known; else none.
        logprobs: one per token where the request asked for them, else none.
        prompt_logprobs: of tokens of the prompt where the request asked for them; all of them are in the first delta.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()
    pieces: tuple[str, ...] = ()


class OutputStream:
    """One completion from its first token to its end; no I/O, no clock.

    The `token_ids` of all deltas together are the tokens that the engine emitted, up to and including the one that completed a stop
    string. Usage may count one more: the engine generates the end-of-sequence token and does not emit it.

    Attributes:
        stopped: a stop string was found, so the engine should cancel the request; the finish reason is still "stop".

    Args:
        stops: strings that end the output and are not part of it.
        min_tokens: the text of so many tokens is not looked at for stop strings, as in vLLM (vllm/v1/engine/detokenizer.py).
        by_token: whether deltas say which token completed which piece of text.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = (), min_tokens: int = 0, *, by_token: bool = False) -> None:
        self._detokenizer = detokenizer
        self._min_tokens = min_tokens
        self._pieces: list[str] | None = [] if by_token else None
        self._stop = StopMatcher(stops) if stops else None
        self._token_ids: list[int] = []
        self._logprobs: list[Logprobs] = []
        self._prompt_logprobs: list[Logprobs] = []
        self._output_tokens = 0
        self.stopped = False

    def push(self, event: TokenEvent) -> TextDelta | None:
        """The text that these tokens complete; None while no character is complete, and after a stop string."""
        _, token_ids, logprobs, prompt_logprobs = event
        if self._stop is None and self._pieces is None:
            # Most events of most streams: nothing is looked for, and nothing waits.
            self._output_tokens += len(token_ids)
            text = self._detokenizer.push(token_ids)
            if text and not self._token_ids and not self._prompt_logprobs:
                return tuple.__new__(TextDelta, (text, token_ids, logprobs, prompt_logprobs, ()))
            self._hold(token_ids, logprobs, prompt_logprobs)
        else:
            self._hold((), (), prompt_logprobs)
            text = self._push_each(token_ids, logprobs)
        return self._delta(text) if text else None

    def _push_each(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs]) -> str:
        """Token by token: the output may end between two tokens of one event."""
        text = ""
        for at, token in enumerate(token_ids):
            if self.stopped:
                break
            self._hold((token,), logprobs[at : at + 1])
            self._output_tokens += 1
            piece = self._until_stop(self._detokenizer.push((token,)))
            if self._pieces is not None:
                self._pieces.append(piece)
            text += piece
        return text

    def _hold(self, token_ids: Sequence[int], logprobs: Sequence[Logprobs], prompt_logprobs: Sequence[Logprobs] = ()) -> None:
        """Keeps them for the next delta."""
        self._token_ids += token_ids
        self._logprobs += logprobs
        self._prompt_logprobs += prompt_logprobs

    def finish(self, event: FinishEvent) -> tuple[TextDelta | None, CompletionEnd]:
        """The rest of the text, and how the completion ended."""
        text = ""
        if not self.stopped:
            text = self._until_stop(self._detokenizer.flush())
            if self._stop and not self.stopped:
                text += self._stop.flush()
        if text and self._pieces is not None:
            self._pieces[-1:] = ["".join(self._pieces[-1:]) + text]
        last = self._delta(text) if text or self._token_ids or self._prompt_logprobs else None
        output_tokens = self._output_tokens if self.stopped else event.completion_tokens
        # An end of the server is one of the request alone, whose text was complete.
        ended = event.reason in ("cancelled", "length", "timeout") or event.code == "draining"
        reason = "stop" if self.stopped and ended else event.reason
        ended_by = None if self.stopped else event.ended_by
        usage, stopped_by = Usage(event.prompt_tokens, output_tokens, event.record), self._stop.matched if self._stop else None
        return last, CompletionEnd(reason, usage, event.message, ended_by, event.code, stopped_by)

    def _until_stop(self, text: str) -> str:
        if self._stop is None or self._output_tokens <= self._min_tokens:
            return text
        text = self._stop.push(text)
        self.stopped = self.stopped or self._stop.hit
        return text

    def _delta(self, text: str) -> TextDelta:
        delta = TextDelta(text, tuple(self._token_ids), tuple(self._logprobs), tuple(self._prompt_logprobs), tuple(self._pieces or ()))
        if self._pieces is not None:
            self._pieces = []
        self._token_ids, self._logprobs, self._prompt_logprobs = [], [], []
        return delta
