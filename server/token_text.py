"""Turns one token into its text and the bytes it stands for."""

from __future__ import annotations

import re
from typing import NamedTuple

from tokenizers import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_PLAIN = (*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1))
_OTHERS = (value for value in range(256) if value not in _PLAIN)
BYTE_OF_CHAR = {chr(value): value for value in _PLAIN} | {chr(256 + i): value for i, value in enumerate(_OTHERS)}
"""What the characters of a byte-level vocabulary stand for (`bytes_to_unicode` in encoder.py of openai/gpt-2)."""

BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
"""A single byte as vocabularies with byte fallback name it."""


class Spelling(NamedTuple):
    """One token alone.

    Attributes:
        text: its decoding, where a special token has its name; bytes that are not UTF-8 are U+FFFD.
        data: the bytes it stands for. In a byte-level vocabulary those of tokens in a row are the UTF-8 of their text.
    """

    text: str
    data: bytes


def spell(tokenizer: Tokenizer, token_id: int) -> Spelling:
    """The spelling of a token; an id that no token has is empty, as models may have more logits than there are tokens."""
    text = str(tokenizer.decode([token_id], skip_special_tokens=False))
    data = text.encode()
    if REPLACEMENT in text:
        name = tokenizer.id_to_token(token_id) or ""
        if byte := BYTE_TOKEN.fullmatch(name):
            data = bytes.fromhex(byte[1])
        elif all(char in BYTE_OF_CHAR for char in name):
            data = bytes(BYTE_OF_CHAR[char] for char in name)
    return Spelling(text, data)
