"""Turns the tokens of one completion into text that never has to be taken back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..runtime.request import FinishEvent, TokenEvent, TokenLogprobs
from .events import Ending
from .tokenizer import Detokenizer, StopMatcher
from .usage import Usage


@dataclass(frozen=True)
class Piece:
    """Text that is safe to show.

    Attributes:
        token_ids: the tokens taken since the piece before.
        logprobs: one per token where the request asked for them, else none.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


class Transcript:
    """One completion from its first token to its end; no I/O, no clock.

    Concatenated over all pieces, `token_ids` are the tokens the engine showed, up to and with the one that completed a stop string.
    Usage counts what was generated, which may be one more: the engine does not show the end-of-sequence token.

    Attributes:
        stopped: a stop string was found, so the engine should be told to cancel; the completion will still end by "stop".
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._stop = StopMatcher(stops) if stops else None
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._output_tokens = 0
        self.stopped = False

    def push(self, event: TokenEvent) -> Piece | None:
        """What can be shown by these tokens; None while no character is complete, and after a stop string."""
        text = ""
        # Token by token where a stop string may end the output between two of them.
        step = 1 if self._stop else max(1, len(event.token_ids))
        for start in range(0, len(event.token_ids), step):
            if self.stopped:
                break
            token_ids = event.token_ids[start : start + step]
            self._token_ids += token_ids
            self._logprobs += event.logprobs[start : start + step]
            self._output_tokens += len(token_ids)
            text += self._checked(self._detokenizer.push(token_ids))
        return self._piece(text) if text else None

    def finish(self, event: FinishEvent) -> tuple[Piece | None, Ending]:
        """What is left to show, and how the completion ended."""
        text = ""
        if not self.stopped:
            text = self._checked(self._detokenizer.flush())
            if self._stop and not self.stopped:
                text += self._stop.flush()
        last = self._piece(text) if text or self._token_ids else None
        output_tokens = self._output_tokens if self.stopped else event.completion_tokens
        reason = "stop" if self.stopped and event.reason in ("cancelled", "length") else event.reason
        return last, Ending(reason, Usage(event.prompt_tokens, output_tokens, event.record), event.message)

    def _checked(self, text: str) -> str:
        if self._stop is None:
            return text
        text = self._stop.push(text)
        self.stopped = self.stopped or self._stop.hit
        return text

    def _piece(self, text: str) -> Piece:
        piece = Piece(text, tuple(self._token_ids), tuple(self._logprobs))
        self._token_ids, self._logprobs = [], []
        return piece
