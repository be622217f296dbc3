"""Text and bytes of single tokens, as log probabilities list them."""

from __future__ import annotations

import re
from typing import NamedTuple

from tokenizers import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_PLAIN = (*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1))
_OTHERS = (value for value in range(256) if value not in _PLAIN)
BYTE_OF_CHAR = {chr(value): value for value in _PLAIN} | {chr(256 + i): value for i, value in enumerate(_OTHERS)}
"""Byte that each character of a byte-level vocabulary stands for (`bytes_to_unicode` in encoder.py of openai/gpt-2)."""

BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
"""Name of a single byte in vocabularies with byte fallback."""


class TokenText(NamedTuple):
    """A single token.

    Attributes:
        text: its decoding; the name of a special token; bytes that are not UTF-8 are U+FFFD.
        data: its bytes. In a byte-level vocabulary the bytes of consecutive tokens are the UTF-8 of their text.
    """

    text: str
    data: bytes


def token_text(tokenizer: Tokenizer, token_id: int) -> TokenText:
    """Text and bytes of a token; empty for an id that no token has, as models may have more logits than tokens."""
    text = str(tokenizer.decode([token_id], skip_special_tokens=False))
    data = text.encode()
    if REPLACEMENT in text:
        name = tokenizer.id_to_token(token_id) or ""
        if byte := BYTE_TOKEN.fullmatch(name):
            data = bytes.fromhex(byte[1])
        else:
            spelt = spelt_bytes(name)
            data = data if spelt is None else spelt
    return TokenText(text, data)


def spelt_bytes(name: str) -> bytes | None:
    """Bytes that the name of a token spells in a byte-level vocabulary; None where a character of it stands for no byte."""
    return bytes(BYTE_OF_CHAR[char] for char in name) if all(char in BYTE_OF_CHAR for char in name) else None
