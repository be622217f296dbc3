"""A tokenizer as llguidance sees it: which tokens are text, and how text that a grammar forces is cut into them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property

from llguidance import LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from ..text.byte_text import TokenBytes, is_byte_level

LARK_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\n]*|#[^\n]*|/(?:[^/\\]|\\.)+/|(?P<name><[^<>\s]+>)', re.DOTALL)
"""A string, a comment, an expression or the name of a token in Lark's notation."""


class GrammarTokens(TokenizerWrapper):
    """What `llguidance.LLTokenizer` reads of a tokenizer.

    Its own reader of a tokenizer.json takes every added token named `<...>` for one that is no text, and cuts forced text into such tokens,
    which it then refuses. Here special tokens alone are no text, and the tokens of a text spell just that text.

    Attributes:
        tokens: bytes of each token, by its id.
        special_token_ids: tokens that are no text: special ones, and those that end an output.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> None:
        self.eos_token_id = eos_token_ids[0]
        added = tokenizer.get_added_tokens_decoder()
        self.special_token_ids = sorted({*eos_token_ids, *(number for number, token in added.items() if token.special)})
        size = max(tokenizer.get_vocab_size(), *(number + 1 for number in (*added, *eos_token_ids)))
        self._encode: Callable[[str], Sequence[int]]
        if is_byte_level(tokenizer):
            text_of = TokenBytes(tokenizer, skip_special=False)
            self.tokens = [text_of[number] for number in range(size)]
            self._encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
        else:
            plain = LLTokenizer(tokenizer.to_str(), slices=[])
            self.tokens = [plain.decode_bytes([number]) if tokenizer.id_to_token(number) else b"" for number in range(plain.vocab_size)]
            self._encode = plain.tokenize_str

    def __call__(self, text: str) -> list[int]:
        """Token ids of a text, which may spell a special token or be none that the tokenizer normalises to itself."""
        data, ids = text.encode(), self._encode(text)
        exact = not self._special.intersection(ids) and b"".join(self.tokens[number] for number in ids) == data
        return list(ids) if exact else self._spelt(data)

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(self.special_token_ids)

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        return {data: number for number, data in enumerate(self.tokens) if data and number not in self._special}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._by_bytes))

    def _spelt(self, data: bytes) -> list[int]:
        """The longest token first; up to a byte that no token has."""
        ids: list[int] = []
        while data:
            length = next((n for n in range(min(self._longest, len(data)), 0, -1) if data[:n] in self._by_bytes), 0)
            if not length:
                break
            ids.append(self._by_bytes[data[:length]])
            data = data[length:]
        return ids


def by_number(lark: str, tokenizer: Tokenizer) -> str:
    """A grammar in Lark's notation, with numbers for the names of added tokens that are not special: llguidance does not know those.

    One in GBNF's notation, which has no such names, stays as it is.
    """
    if "::=" in lark:
        return lark
    numbers = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items() if not token.special}

    def numbered(found: re.Match[str]) -> str:
        number = numbers.get(str(found["name"]))
        return found[0] if number is None else f"<[{number}]>"

    return LARK_TOKEN.sub(numbered, lark)
