"""The tokenizer of a served model: text to token ids, and incremental detokenisation with stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from ...graphs.errors import ModelError
from .added_tokens import add_tokens
from .byte_text import ByteDetokenizer, TokenBytes, is_byte_level
from .prompt_bound import chars_per_token
from .tiktoken_file import FILE as TIKTOKEN
from .tiktoken_file import read_tiktoken
from .token_text import REPLACEMENT, TokenText, token_text

UNFINISHED_CHARS = 3
"""An incomplete UTF-8 sequence has at most three bytes, so at most this many trailing replacement characters may still change."""

WINDOW_TOKENS = 64
"""Length at which a window that never ended in a complete character is cut behind bytes that can no longer change."""

TOKEN_TEXT_CACHE_SIZE = 2**16
"""Tokens whose text is cached; a response with log probabilities needs the text of up to 21 tokens at every position."""


class Detokenizer(Protocol):
    """Decodes token ids as they arrive; the returned pieces concatenate to the decoding of all ids."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that later tokens can no longer change."""

    def flush(self) -> str:
        """The rest, at the end of the stream."""


class TextTokenizer:
    """A `tokenizer.json`: text to token ids and back.

    Attributes:
        library: the tokenizer as the library `tokenizers` has it.
        added: whether it is more than its file is: that is no tokenizer.json, or others beside it added tokens.
    """

    def __init__(self, tokenizer: Tokenizer, added: bool = False) -> None:
        self.added = added
        # A truncation or padding stored in the file would silently change prompts.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.library = tokenizer
        self._token_text = lru_cache(TOKEN_TEXT_CACHE_SIZE)(partial(token_text, tokenizer))
        self._token_bytes = {skip: TokenBytes(tokenizer, skip_special=skip) for skip in (True, False)} if is_byte_level(tokenizer) else {}

    @staticmethod
    def load(path: Path) -> TextTokenizer:
        """Reads a tokenizer.json or Kimi's tiktoken.model, or the directory that holds one, with the tokens that other files there add.

        Raises:
            ModelError: there is none, or it is malformed, or another file contradicts it.
        """
        files = [path / "tokenizer.json", path / TIKTOKEN] if path.is_dir() else [path]
        file = next((file for file in files if file.is_file()), files[0])
        if not file.is_file():
            raise ModelError(f"{file} does not exist; text needs a tokenizer.json, or a {TIKTOKEN} of Kimi's")
        try:
            library = read_tiktoken(file) if file.name == TIKTOKEN else Tokenizer.from_file(str(file))
            tokenizer = TextTokenizer(library, add_tokens(library, file.parent) or file.name == TIKTOKEN)
        except ModelError:
            raise
        except Exception as error:  # The library raises bare Exception for every malformed file.
            raise ModelError(f"{file} is not a tokenizer.json: {error}") from error
        # Takes as long as reading the file; not to be left to the first long prompt.
        _ = tokenizer._most_chars
        return tokenizer

    def encode(self, text: str, *, add_special: bool = True) -> tuple[int, ...]:
        """Token ids of a prompt, with whatever the tokenizer adds around it; without that for the text of a chat template.

        Other threads run meanwhile, as the library's batches do.
        """
        return tuple(self.library.encode_batch_fast([text], add_special_tokens=add_special)[0].ids)

    def spellings(self, word: str) -> tuple[tuple[int, ...], ...]:
        """Token ids of a word at the beginning of a text and, if that is as many tokens of which the first differs, behind a space.

        What vLLM forbids for a bad word (`SamplingParams.update_from_tokenizer`, vllm/sampling_params.py).
        """
        first, behind = (self.encode(prefix + word.lstrip(), add_special=False) for prefix in ("", " "))
        differs = len(behind) == len(first) > 0 and behind[0] != first[0]
        return (first, behind) if differs else (first,)

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that the text has at least, from its length alone; 0 where the tokenizer allows no such bound."""
        return 0 if self._most_chars is None else -(-len(text) // self._most_chars)

    @cached_property
    def _most_chars(self) -> int | None:
        return chars_per_token(self.library)

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ids; special tokens are left out unless `skip_special` is false, bytes that are not UTF-8 become U+FFFD."""
        return str(self.library.decode(list(token_ids), skip_special_tokens=skip_special))

    def is_special(self, text: str) -> bool:
        """Whether a text is a special token, which `decode` leaves out."""
        return text in self._special

    @cached_property
    def _special(self) -> frozenset[str]:
        return frozenset(token.content for token in self.library.get_added_tokens_decoder().values() if token.special)

    def detokenizer(self, *, skip_special: bool = True) -> Detokenizer:
        """An incremental detokenizer for one completion."""
        if self._token_bytes:
            return ByteDetokenizer(self._token_bytes[skip_special])
        # Without a call in between: it decodes twice for each event of a stream.
        return WindowDetokenizer(partial(self.library.decode, skip_special_tokens=skip_special))

    def token_text(self, token_id: int) -> TokenText:
        """Text and bytes of a single token."""
        return self._token_text(token_id)


class WindowDetokenizer:
    """See `Detokenizer`; of any vocabulary.

    A window of the latest tokens is decoded: tokens up to the last complete character give context, the tokens after it are new. A
    trailing U+FFFD may be a character whose last bytes are still to come and is held back. The pieces add up exactly with byte-level
    tokenizers; one with byte fallback may revise text that it has already decoded.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._clean = 0
        self._sent_chars = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that later tokens can no longer change."""
        self._window.extend(token_ids)
        text = self._decode(self._window)
        incomplete = len(text) - len(text.rstrip(REPLACEMENT)) if text.endswith(REPLACEMENT) else 0
        safe = max(self._sent_chars, len(text) - min(incomplete, UNFINISHED_CHARS))
        delta = text[self._sent_chars : safe]
        self._sent_chars = safe
        if not incomplete:
            del self._window[: self._clean]
            self._clean = len(self._window)
            self._sent_chars = len(self._decode(self._window))
        elif len(self._window) > WINDOW_TOKENS:
            self._cut(text)
        return delta

    def flush(self) -> str:
        """The rest, at the end of the stream."""
        return self._decode(self._window)[self._sent_chars :]

    def _cut(self, text: str) -> None:
        """Drops old tokens where decoding both sides of the cut separately gives the same text.

        The text of the dropped tokens has been sent, so none of their characters can still be incomplete.
        """
        for count in range(len(self._window) - 1, 0, -1):
            old, new = self._decode(self._window[:count]), self._decode(self._window[count:])
            if old + new == text and len(old) <= self._sent_chars:
                self._sent_chars -= len(old)
                del self._window[:count]
                self._clean = 0
                return


class StopMatcher:
    """Cuts a stream of text before the first stop string.

    First is the stop string that ends earliest, because generation has to stop there; of several ending there, the longest.
    Text that may be the beginning of a stop string is held back.

    Attributes:
        matched: the stop string that was found; None before.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._pending = ""
        self.matched: str | None = None

    @property
    def hit(self) -> bool:
        """Whether a stop string has been found."""
        return self.matched is not None

    def push(self, text: str) -> str:
        """The text that is certainly before any stop string; sets `matched` once one is complete."""
        if self.hit:
            return ""
        text = self._pending + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            end, start = min(matches)
            self.matched, self._pending = text[start:end], ""
            return text[:start]
        keep = next((n for n in range(min(self._longest - 1, len(text)), 0, -1) if self._may_begin(text[-n:])), 0)
        self._pending = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text that was held back, at the end of the stream."""
        pending, self._pending = self._pending, ""
        return pending

    def _may_begin(self, tail: str) -> bool:
        return any(stop.startswith(tail) for stop in self._stops)
