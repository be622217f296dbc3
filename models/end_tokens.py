"""Reads which tokens end a response: all that any file of a checkpoint names, since a chat may end with another one than a text."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..graphs.errors import ConfigError
from .config import Fields, read_json

TOKENIZER, TOKENIZER_CONFIG, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
TIKTOKEN = "tiktoken.model"
"""What Kimi's checkpoints have in place of the first."""


def tokenizer_file(directory: Path) -> Path | None:
    """The file of a checkpoint's tokenizer; None where it has none."""
    return next((file for name in (TOKENIZER, TIKTOKEN) if (file := directory / name).is_file()), None)


def end_tokens(directory: Path, values: Mapping[str, Any]) -> dict[int, tuple[str, ...]]:
    """Token ids that end a response, each with the files that name it; generation_config.json's first.

    An empty list and null name none, and hide nothing that another file names.

    Args:
        values: the fields of config.json.

    Raises:
        ConfigError: an id or a token is malformed.
    """
    named: dict[int, tuple[str, ...]] = {}
    for file, token in _named(directory, values):
        named[token] = tuple(dict.fromkeys((*named.get(token, ()), file)))
    return named


def _named(directory: Path, values: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    config = Fields(values, str(directory / "config.json"))
    path = directory / GENERATION
    if path.exists():
        yield from ((GENERATION, token) for token in _ids(Fields(read_json(path), str(path))))
    for fields in (config, config.sub("text_config")):
        yield from (("config.json", token) for token in _ids(fields))
    text = special_token(directory, "eos_token")
    token = None if text is None else token_ids(directory).get(text)
    if token is not None:
        yield TOKENIZER_CONFIG, token


def _ids(fields: Fields) -> list[int]:
    value = fields.values.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        raise ConfigError(f"{fields.where}: eos_token_id is {value!r}; expected a token id or a list of them")
    return ids


def special_token(directory: Path, name: str) -> str | None:
    """Text of a special token by tokenizer_config.json, where it is a text or an object with its text as content; None where it has none.

    Older files have special_tokens_map.json beside it, which transformers reads where tokenizer_config.json lists no added tokens.

    Raises:
        ConfigError: it is neither.
    """
    path, older = directory / TOKENIZER_CONFIG, directory / "special_tokens_map.json"
    values = read_json(path) if path.is_file() else {}
    if "added_tokens_decoder" not in values and older.is_file():
        values = {**values, **read_json(older)}
    token = values.get(name)
    text = token.get("content") if isinstance(token, Mapping) else token
    if text is not None and not isinstance(text, str):
        raise ConfigError(f"{path}: {name} is {token!r}; expected a text, or an object with content")
    return text


def token_ids(directory: Path) -> Mapping[str, int]:
    """Ids of tokens by text: of a tokenizer.json, added ones before those of its vocabulary, and those of files beside a tokenizer.

    Raises:
        ConfigError: a file is no JSON object.
    """
    path, config, added = directory / TOKENIZER, directory / TOKENIZER_CONFIG, directory / "added_tokens.json"
    if tokenizer_file(directory) is None:
        return {}
    beside = read_json(added) if added.is_file() else {}
    decoder = read_json(config).get("added_tokens_decoder") if config.is_file() else None
    if isinstance(decoder, Mapping):
        beside = {
            str(token.get("content")): int(place) for place, token in decoder.items() if isinstance(token, Mapping) and place.isdecimal()
        }
    own = _token_ids(path.resolve(), (stat := path.stat()).st_mtime_ns, stat.st_size) if path.is_file() else {}
    return {**own, **{k: v for k, v in beside.items() if type(v) is int}}


@functools.lru_cache(maxsize=4)
def _token_ids(path: Path, *stamp: int) -> Mapping[str, int]:
    values = read_json(path)
    model, added = values.get("model"), values.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    # Other kinds of tokenizers list pieces with their scores, in the order of their ids.
    if isinstance(vocabulary, list):
        vocabulary = {str(piece[0]): token for token, piece in enumerate(vocabulary) if isinstance(piece, list) and piece}
    tokens = [token for token in added if isinstance(token, Mapping)] if isinstance(added, list) else []
    pairs = [*vocabulary.items(), *((token.get("content"), token.get("id")) for token in tokens)] if isinstance(vocabulary, dict) else []
    return {text: token for text, token in pairs if isinstance(text, str) and type(token) is int}
