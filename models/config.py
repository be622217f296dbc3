"""Typed access to the fields of a config.json; a missing or malformed field is refused by name."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..graphs.errors import ConfigError
from .directories import contents, missing

T = TypeVar("T", int, float, bool, str)
_REQUIRED = object()
MOST_LAYERS = 1024
_LARGEST = 2**53  # above it floats cannot represent every integer; NaN and infinity fail the comparison too

PICTURE_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
"""Fields with the tokens that stand in a prompt for rows of pictures and of videos, and around them."""


class Fields:
    """Typed access to one JSON object, which remembers the fields that were asked for: `refuse_others` refuses the rest.

    Args:
        values: the object.
        where: its name in errors, e.g. `config.json: text_config`.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where
        self._asked: set[str] = set()
        self._parts: dict[str, Fields] = {}

    def get(self, kind: type[T], *names: str, default: Any = _REQUIRED, minimum: float | None = None) -> T:
        """The value of the one of `names` that is present, as `kind`.

        Raises:
            ConfigError: when none is present and there is no default, several are and disagree, or the value has another type, is too small
                or too large.
        """
        self._asked.update(names)
        there = [name for name in names if self.has(name)]
        for name in there[1:]:
            if self.values[name] != (first := self.values[there[0]]):
                raise ConfigError(f"{self.where}: {there[0]} is {first!r} and {name} is {self.values[name]!r}; both mean the same")
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            is_integer = isinstance(value, int) and not isinstance(value, bool)
            if not (is_integer if kind is int else isinstance(value, kind) or (kind is float and is_integer)):
                raise ConfigError(f"{self.where}: {name} is {value!r}; expected {kind.__name__}")
            if not isinstance(value, str) and not abs(value) <= _LARGEST:
                raise ConfigError(f"{self.where}: {name} is {value!r}; expected a number of at most {_LARGEST}")
            if minimum is not None and not isinstance(value, str) and value < minimum:
                raise ConfigError(f"{self.where}: {name} is {value!r}; expected at least {minimum}")
            return kind(value)
        if default is _REQUIRED:
            raise ConfigError(f"{self.where}: {' or '.join(names)} is missing")
        return default  # type: ignore[no-any-return]

    def only(self, name: str, *legal: bool | str | float) -> None:
        """Accepts an absent field, or one that holds a supported value.

        Raises:
            ConfigError: for any other value.
        """
        self._asked.add(name)
        value = self.values.get(name)
        if value is not None and not any(type(value) is type(choice) and value == choice for choice in legal):
            choices = " or ".join(map(repr, legal))
            raise ConfigError(f"{self.where}: {name} is {value!r}; supported is {choices}")

    def only_legal(self, table: Mapping[str, Sequence[bool | str | float]]) -> None:
        """As `only`, of each field of a table."""
        for name, legal in table.items():
            self.only(name, *legal)

    def sub(self, name: str) -> Fields:
        """A nested object; an absent one is an empty one.

        Raises:
            ConfigError: when the value is not an object.
        """
        self._asked.add(name)
        value = self.values.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{self.where}: {name} is {value!r}; expected an object")
        return self._parts.setdefault(name, Fields(value or {}, f"{self.where}: {name}"))

    def num_layers(self) -> int:
        """`num_hidden_layers`.

        Raises:
            ConfigError: when it is missing, or no number of layers.
        """
        count = self.get(int, "num_hidden_layers", minimum=1)
        if count > MOST_LAYERS:
            raise ConfigError(f"{self.where}: num_hidden_layers is {count}; expected at most {MOST_LAYERS}")
        return count

    def dense_layers(self) -> tuple[int, ...]:
        """Layers of a mixture of experts without experts: those of `mlp_only_layers`, and all but each `decoder_sparse_step`-th.

        Raises:
            ConfigError: when either field is malformed.
        """
        self._asked.add("mlp_only_layers")
        count, step = self.num_layers(), self.get(int, "decoder_sparse_step", default=1, minimum=1)
        named = self.values.get("mlp_only_layers") or []
        if not isinstance(named, list | tuple) or not all(type(i) is int for i in named):
            raise ConfigError(f"{self.where}: mlp_only_layers is {named!r}; expected a list of layers")
        return tuple(i for i in range(count) if i in named or (i + 1) % step)

    def kinds(self, name: str, *legal: str) -> tuple[str, ...] | None:
        """A list with the kind of each layer; None where the field is absent.

        Raises:
            ConfigError: it is no list of as many kinds as there are layers.
        """
        self._asked.add(name)
        value, count = self.values.get(name), self.num_layers()
        if value is None:
            return None
        if not isinstance(value, list | tuple) or len(value) != count or not all(kind in legal for kind in value):
            raise ConfigError(f"{self.where}: {name} is {value!r}; expected {count} of {' and '.join(map(repr, legal))}")
        return tuple(value)

    def has(self, name: str) -> bool:
        """Whether a field is present and not null."""
        self._asked.add(name)
        return self.values.get(name) is not None

    def refuse_others(self, known: Collection[str]) -> None:
        """Refuses a field that nobody asked for, unless it is off: a model with it may compute something else.

        Args:
            known: fields that need not be asked for.

        Raises:
            ConfigError: naming the field.
        """
        for name, value in self.values.items():
            if value and name not in self._asked and name not in known and not name.startswith("_"):
                raise ConfigError(
                    f"{self.where}: {name} is {value!r}, and nothing here reads it; legal is a file without the field, or with it off, if "
                    "the model computes the same without it"
                )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ConfigError: when the file is missing, is not JSON, or does not hold an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: {missing(path)}; a checkpoint directory holds config.json, and {contents(path.parent)}") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, or a number of thousands of digits
        raise ConfigError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds a JSON {type(value).__name__}; expected an object")
    return value
