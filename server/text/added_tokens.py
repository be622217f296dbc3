"""Tokens that the files beside a tokenizer.json add to it, which transformers matches in texts as whole ones.

Source of the rules: transformers 5.23, tokenization_utils_base.py (`_from_pretrained`) and tokenization_utils_tokenizers.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from ...graphs.errors import ModelError

CONFIG, ADDED, SPECIAL = "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"
DECODER = "added_tokens_decoder"
"""Field of the first file; where it is there the two others are not read."""

EXTRA = ("extra_special_tokens", "additional_special_tokens")
_FLAGS = ("lstrip", "normalized", "rstrip", "single_word", "special")
_NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


def add_tokens(tokenizer: Tokenizer, directory: Path) -> bool:
    """Adds them; whether there were any.

    Raises:
        ModelError: a file is malformed, or a token would have another id than its file says.
    """
    before = _state(tokenizer)
    config = _read(directory / CONFIG)
    places, named = _placed(directory, config)
    tokens = [token for _, token in sorted(places.items())]
    known = {*(token.content for token in tokenizer.get_added_tokens_decoder().values()), *(token.content for token in tokens)}
    for value in named:
        token = _token(value, directory / CONFIG, special=True)
        if token.content not in known:
            known.add(token.content)
            tokens.append(token)
    tokenizer.add_tokens(tokens)
    for place, token in places.items():
        if (found := tokenizer.token_to_id(token.content)) != place:
            raise ModelError(
                f"{directory}: the token {token.content!r} is {place} where {DECODER} of {CONFIG}, or {ADDED}, adds it, and {found} behind "
                f"the {tokenizer.get_vocab_size()} tokens of the tokenizer; legal is a tokenizer.json that holds it"
            )
    return _state(tokenizer) != before


def tokens_by_id(directory: Path) -> dict[int, AddedToken]:
    """Tokens by the ids that the files give them.

    Raises:
        ModelError: a file is malformed.
    """
    return _placed(directory, _read(directory / CONFIG))[0]


def class_named(directory: Path) -> str:
    """The class of the tokenizer, `MODULE.CLASS` where it is Python of the checkpoint; "" where no file names one.

    Raises:
        ModelError: a file is malformed.
    """
    config = _read(directory / CONFIG)
    own = config["auto_map"].get("AutoTokenizer") if isinstance(config.get("auto_map"), Mapping) else None
    named = own[0] if isinstance(own, list) and own else own
    # Copies name the repository that has the Python: ORG/NAME--MODULE.CLASS.
    return str(named or config.get("tokenizer_class") or "").rpartition("--")[2]


def _placed(directory: Path, config: Mapping[str, Any]) -> tuple[dict[int, AddedToken], list[Any]]:
    """Tokens whose ids a file says, and those that are named alone, as text or object, each where it is first named."""
    values = dict(config)
    if DECODER in config:
        where = directory / CONFIG
        entries = _object(config[DECODER], where).items()
        places = {_id(place, where): _token(value, where) for place, value in entries}
    else:
        values |= _read(directory / SPECIAL)
        where = directory / ADDED
        special = {_text(value) for value in _named(values)}
        places = {
            _id(place, where): AddedToken(text, normalized=text not in special, special=text in special)
            for text, place in _read(where).items()
        }
    return places, _named(values)


def _named(values: Mapping[str, Any]) -> list[Any]:
    extra = next((values[name] for name in EXTRA if values.get(name)), ())
    own = [values[name] for name in values if name.endswith("_token") and name not in _NAMED and isinstance(values[name], str)]
    named = [values[name] for name in _NAMED if values.get(name)]
    return [*named, *own, *(extra.values() if isinstance(extra, Mapping) else extra)]


def _token(value: Any, where: Path, **given: bool) -> AddedToken:
    text = _text(value)
    if not text:
        raise ModelError(f"{where}: {value!r} is no token; expected a text, or an object with content")
    flags = {name: bool(value[name]) for name in _FLAGS if name in value} if isinstance(value, Mapping) else {}
    return AddedToken(text, **(flags | given))


def _text(value: Any) -> str:
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else ""


def _id(value: Any, where: Path) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ModelError(f"{where}: {value!r} is no id of a token; expected a number") from None


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        return dict(_object(json.loads(file.read_text(encoding="utf-8")), file))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file}: not readable as JSON: {error}") from None


def _object(value: Any, where: Path) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ModelError(f"{where}: holds a JSON {type(value).__name__} where an object of tokens is expected")
    return value


def _state(tokenizer: Tokenizer) -> dict[int, tuple[object, ...]]:
    decoder = tokenizer.get_added_tokens_decoder()
    return {place: (token.content, *(getattr(token, flag) for flag in _FLAGS)) for place, token in decoder.items()}
