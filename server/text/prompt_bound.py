"""How few tokens a text can have, from its length: a prompt that cannot fit is refused before it is tokenised."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer

MOST_COMPOSED = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1}
"""Characters that a normalizer can make one of. No character decomposes canonically into more than four (Unicode, UAX 15)."""

KEEPING = frozenset({"ByteLevel", "Split", "Digits", "Sequence", "Metaspace"})
"""Pre-tokenizers that lose no character; `Split` only if it does not remove what it splits at."""


def chars_per_token(tokenizer: Tokenizer) -> int | None:
    """Most characters of a text that one token can stand for; None where a part of the tokenizer may drop characters, or is not known.

    A character is at least one byte, and every byte of a byte-level vocabulary is in a token, so that it is the length of the longest
    token, times the characters that normalisation may make one of.
    """
    parts = json.loads(tokenizer.to_str())
    model, added = parts["model"], parts["added_tokens"]
    composed = 1
    for normalizer in _flat(parts["normalizer"], "normalizers"):
        if normalizer["type"] not in MOST_COMPOSED:
            return None
        composed *= MOST_COMPOSED[normalizer["type"]]
    pre = list(_flat(parts["pre_tokenizer"], "pretokenizers"))
    byte_level = any(part["type"] == "ByteLevel" for part in pre)
    keeps = all(part["type"] in KEEPING and part.get("behavior") != "Removed" for part in pre)
    if model["type"] != "BPE" or not byte_level or not keeps or any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    longest = max((len(token) for token in (*model["vocab"], *(token["content"] for token in added))), default=1)
    return max(1, longest * composed)


def _flat(part: Mapping[str, Any] | None, inner: str) -> Iterator[Mapping[str, Any]]:
    if part is None:
        return
    if part["type"] == "Sequence":
        for item in part[inner]:
            yield from _flat(item, inner)
    else:
        yield part
