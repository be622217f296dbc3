"""Turns text into token ids and a stream of token ids back into text that never has to be taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path

from tokenizers import Tokenizer

from ..graphs.errors import ModelError
from .token_text import REPLACEMENT, Spelling, spell

UNFINISHED_CHARS = 3
"""A UTF-8 sequence that misses its end has at most three bytes, so at most this many replacement characters may still change."""

WINDOW_TOKENS = 64
"""Tokens without a clean end after which the window is cut behind bytes that can no longer change."""

MAX_SPELLINGS = 2**16
"""Tokens whose spelling is remembered; a response with log probabilities asks for those of up to 21 tokens at every place."""


class TextCodec:
    """A `tokenizer.json`: text to ids and back."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # A stored truncation or padding would change prompts without a word.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._spell = lru_cache(MAX_SPELLINGS)(partial(spell, tokenizer))

    @staticmethod
    def load(path: Path) -> TextCodec:
        """Reads `path`, a tokenizer.json or the directory that holds one.

        Raises:
            ModelError: there is none, or it is malformed.
        """
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise ModelError(f"{file} does not exist; text needs a tokenizer.json")
        try:
            return TextCodec(Tokenizer.from_file(str(file)))
        except Exception as error:  # The library raises bare Exception for every malformed file.
            raise ModelError(f"{file} is not a tokenizer.json: {error}") from error

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a prompt, with whatever the tokenizer adds around it."""
        return tuple(self._tokenizer.encode(text).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids; special tokens are silent, bytes that are not UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def detokenizer(self) -> Detokenizer:
        """A fresh stream from ids to text."""
        return Detokenizer(self.decode)

    def spell(self, token_id: int) -> Spelling:
        """One token alone."""
        return self._spell(token_id)


class Detokenizer:
    """Turns ids that arrive in pieces into text whose concatenation is the decoding of all of them.

    A window of the latest tokens is decoded: the ones before the last clean end give their successors the context they are joined in,
    the ones after it are new. A trailing U+FFFD may be a character whose last bytes are still to come and is held back.
    The equality holds for byte-level tokenizers; one with byte fallback may revise text it has already decoded.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._clean = 0
        self._sent_chars = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that has become safe to send."""
        self._window.extend(token_ids)
        text = self._decode(self._window)
        held = len(text) - len(text.rstrip(REPLACEMENT))
        safe = max(self._sent_chars, len(text) - min(held, UNFINISHED_CHARS))
        fresh = text[self._sent_chars : safe]
        self._sent_chars = safe
        if not held:
            del self._window[: self._clean]
            self._clean = len(self._window)
            self._sent_chars = len(self._decode(self._window))
        elif len(self._window) > WINDOW_TOKENS:
            self._cut(text)
        return fresh

    def flush(self) -> str:
        """The rest, at the end of the stream."""
        return self._decode(self._window)[self._sent_chars :]

    def _cut(self, text: str) -> None:
        """Drops old tokens of a window that never ends cleanly, where decoding the two sides apart changes nothing.

        What they said has been sent, so no character of theirs can still be waiting for its last bytes.
        """
        for count in range(len(self._window) - 1, 0, -1):
            old, kept = self._decode(self._window[:count]), self._decode(self._window[count:])
            if old + kept == text and len(old) <= self._sent_chars:
                self._sent_chars -= len(old)
                del self._window[:count]
                self._clean = 0
                return


class StopMatcher:
    """Cuts a stream of text at the first stop string, which is not part of the output.

    First is the one that ends earliest, as that is where generation has to stop; of several ending there, the longest.
    Text that may turn out to be the beginning of a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.hit = False

    def push(self, text: str) -> str:
        """Text that is certainly before any stop string; sets `hit` once one is complete."""
        if self.hit:
            return ""
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self.hit = True
            self._held = ""
            return text[: min(found)[1]]
        keep = next((n for n in range(min(self._longest - 1, len(text)), 0, -1) if self._may_begin(text[-n:])), 0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, at the end of the stream."""
        held, self._held = self._held, ""
        return held

    def _may_begin(self, tail: str) -> bool:
        return any(stop.startswith(tail) for stop in self._stops)
