"""Reads Kimi's `tiktoken.model`, tokens and their ranks, as the tokenizer that a tokenizer.json of the same checkpoint would hold.

Kimi's own reader is Python of the checkpoint, tokenization_kimi.py: its pattern is read there and compared, and nothing of it is run.
Source of the format: tiktoken 0.14, load.py; of merges from ranks: transformers 5.23, convert_slow_tokenizer.py (`TikTokenConverter`).
"""

from __future__ import annotations

import ast
import base64
from collections.abc import Iterator, Mapping
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from ...graphs.errors import ModelError
from .added_tokens import CONFIG, class_named, tokens_by_id
from .token_text import BYTE_OF_CHAR

FILE, CODE = "tiktoken.model", "tokenization_kimi.py"
CLASS = "tokenization_kimi.TikTokenTokenizer"
RESERVED = 256
"""Tokens behind those with ranks, `<|reserved_token_ID|>` where tokenizer_config.json names none (`num_reserved_special_tokens`)."""

_WORD, _CONTRACTION = r"[^\r\n\p{L}\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = (rf"[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_WORD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_WORD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""What a text is split at before bytes are merged: `pat_str` of tokenization_kimi.py, the same in Kimi-K2 to K2.5 and K3."""

_CHARS = {byte: char for char, byte in BYTE_OF_CHAR.items()}


def read_tiktoken(file: Path) -> Tokenizer:
    """Reads a tiktoken.model, with the tokens that tokenizer_config.json beside it names and the reserved ones between them.

    Raises:
        ModelError: the file is malformed, or belongs to a tokenizer of another class or pattern than Kimi's.
    """
    _check_kind(file)
    ranks = _ranks(file)
    names = {token: _name(token) for token in ranks}
    vocabulary = {names[token]: rank for token, rank in ranks.items()}
    # A piece that is a token is that token, whatever pairs it is made of.
    tokenizer = Tokenizer(models.BPE(vocabulary, [(names[left], names[right]) for left, right in _merges(ranks)], ignore_merges=True))
    parts = [pre_tokenizers.Split(Regex(PATTERN), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    named = tokens_by_id(file.parent)
    ids = range(len(ranks), max(len(ranks) + RESERVED, *(place + 1 for place in named), 0))
    tokenizer.add_tokens([named.get(place) or AddedToken(f"<|reserved_token_{place}|>", normalized=False, special=True) for place in ids])
    return tokenizer


def _check_kind(file: Path) -> None:
    named, otherwise = class_named(file.parent), "a tokenizer.json beside it, or token ids alone without this file"
    if named != CLASS:
        raise ModelError(f"{file}: {CONFIG} says that its tokenizer is {named or 'of no class'}; legal is {CLASS}, {otherwise}")
    code = file.with_name(CODE)
    if code.is_file() and (pattern := _pattern(code)) != PATTERN:
        raise ModelError(f"{file}: {code.name} splits texts by {pattern!r}; legal is {PATTERN!r}, {otherwise}")


def _pattern(code: Path) -> str | None:
    """The text, or texts to be joined by bars, that a Python file assigns to pat_str; None where it does not say it so."""
    try:
        nodes = list(ast.walk(ast.parse(code.read_bytes())))
        values = [node.value for node in nodes if isinstance(node, ast.Assign) and "pat_str" in map(ast.unparse, node.targets)]
        pieces = [ast.literal_eval(value.args[0] if isinstance(value, ast.Call) else value) for value in values]
        return "|".join([pieces[0]] if isinstance(pieces[0], str) else pieces[0])
    except (OSError, SyntaxError, ValueError, TypeError, IndexError, RecursionError, MemoryError):
        return None


def _ranks(file: Path) -> dict[bytes, int]:
    """Ranks of tokens by their bytes, in order: a line each of the file, with the bytes in base64."""
    try:
        lines = [line.split() for line in file.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: {error}; expected lines of a token in base64 and its rank") from None
    if sorted(ranks.values()) != list(range(len(lines))):
        raise ModelError(f"{file}: has {len(lines)} lines and not each of the ranks from 0 to {len(lines) - 1} for a token of its own")
    if absent := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ModelError(f"{file}: has no token of the byte {absent[0]}, and {len(absent)} of 256 are absent; texts need all")
    return dict(sorted(ranks.items(), key=lambda item: item[1]))


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Pairs of tokens that make a token, first those of the lowest rank; of one token's pairs that of the lowest ranks first."""
    for token in ranks:
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        yield from sorted(
            (pair for pair in pairs if pair[0] in ranks and pair[1] in ranks), key=lambda pair: (ranks[pair[0]], ranks[pair[1]])
        )


def _name(token: bytes) -> str:
    return "".join(map(_CHARS.__getitem__, token))
