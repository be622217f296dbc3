"""Values of a size from those of three sizes: what differs are numbers, each of which grows by the same with every row.

Values are trees of dictionaries, sequences, dataclasses and protobuf messages. Numbers are integers, those in texts, and bytes that are no
text, as one number. Two sizes would tell of what a number is made; the third shows that it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from ..graphs.errors import LoweringError

Form = Callable[[int], Any]
"""The value of a size.

Raises:
    LoweringError: a number would be none for it.
"""
Values = Sequence[Any]
Sizes = Sequence[int]
Path = tuple[str | int, ...]

_NUMBER = re.compile(r"(\d+)")
_SHOWN = 60


def between(values: Values, sizes: Sizes, where: str = "") -> Form:
    """The form of values of three sizes.

    Args:
        where: what the values are, for a message.

    Raises:
        LoweringError: naming what differs by more than numbers, or does not grow by the same with every row.
    """
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        raise _unlike(values, sizes, where)
    if hasattr(first, "ListFields"):
        return _message(values, sizes)
    if isinstance(first, Mapping):
        if any(value.keys() != first.keys() for value in values):
            raise _unlike([sorted(value) for value in values], sizes, where)
        return _tree(first, [value.values() for value in values], sizes, where, lambda made: dict(zip(first, made, strict=True)))
    if isinstance(first, (list, tuple)):
        if any(len(value) != len(first) for value in values):
            raise _unlike([f"{len(value)} of them" for value in values], sizes, where)
        if all(value == first for value in values):
            return lambda _: first
        return _tree(range(len(first)), values, sizes, where, type(first))
    if hasattr(first, "__dataclass_fields__"):
        names = [field.name for field in fields(first)]
        parts = [[getattr(value, name) for name in names] for value in values]
        return _tree(names, parts, sizes, where, lambda made: type(first)(**dict(zip(names, made, strict=True))))
    return _leaf(values, sizes, where)


def _tree(names: Any, values: Values, sizes: Sizes, where: str, make: Callable[[Sequence[Any]], Any]) -> Form:
    # What is one object in each is one in what follows.
    order = [tuple(map(id, same)) for same in zip(*values, strict=True)]
    distinct = dict(zip(order, zip(names, *values, strict=True), strict=True))
    parts = {key: between(same, sizes, f"{where}.{name}".lstrip(".")) for key, (name, *same) in distinct.items()}

    def tree(size: int) -> Any:
        made = {key: part(size) for key, part in parts.items()}
        return make([made[key] for key in order])

    return tree


def _leaf(values: Values, sizes: Sizes, where: str) -> Form:
    first = values[0]
    if all(value == first for value in values):
        return lambda _: first
    if isinstance(first, str):
        return _text(values, sizes, where)
    if isinstance(first, bytes) and all(value.isascii() and value.replace(b"\n", b" ").decode().isprintable() for value in values):
        text = _text([value.decode() for value in values], sizes, where)
        return lambda size: text(size).encode()
    if isinstance(first, bytes) and len({len(value) for value in values}) == 1:
        number = _line([int.from_bytes(value, "little") for value in values], sizes, where)
        return lambda size: number(size).to_bytes(len(first), "little")
    if type(first) is int:
        return _line(values, sizes, where)
    raise _unlike(values, sizes, where)


def _line(values: Sequence[int], sizes: Sizes, where: str) -> Callable[[int], int]:
    rise, run = values[2] - values[0], sizes[2] - sizes[0]
    if (values[1] - values[0]) * run != rise * (sizes[1] - sizes[0]):
        raise _unlike(values, sizes, where)

    def number(size: int) -> int:
        more, rest = divmod(rise * (size - sizes[0]), run)
        if rest or values[0] + more < 0:
            raise LoweringError(f"{where} is {values[0]} for {sizes[0]} rows and {rise} more for {run} more, which is no number for {size}")
        return values[0] + more

    return number


def _text(values: Sequence[str], sizes: Sizes, where: str) -> Callable[[int], str]:
    split = [_NUMBER.split(value) for value in values]
    if len({len(parts) for parts in split}) != 1:
        raise _unlike(_lines_of(values), sizes, where)
    grows, done = list[tuple[str, Callable[[int], int]]](), 0
    for i, parts in enumerate(zip(*split, strict=True)):
        if len(set(parts)) > 1:
            # What begins with a zero is no number but a part of a name.
            if not i % 2 or any(part != str(int(part)) for part in parts):
                raise _unlike(_lines_of(values), sizes, where)
            grows.append(("".join(split[0][done:i]), _line([int(part) for part in parts], sizes, where)))
            done = i + 1
    rest = "".join(split[0][done:])
    return lambda size: "".join([f"{before}{number(size)}" for before, number in grows]) + rest


def _lines_of(texts: Sequence[str]) -> Sequence[str]:
    """The first lines that differ by more than numbers."""
    rows = zip(*(text.splitlines() for text in texts), strict=False)
    return next((row for row in rows if len({_NUMBER.sub("0", line) for line in row}) > 1), texts)


def _message(values: Values, sizes: Sizes) -> Form:
    grows = _grows(values, sizes, ())

    def message(size: int) -> Any:
        made = type(values[0])()
        made.CopyFrom(values[0])
        if grows:
            _grow(made, grows, size)
        return made

    return message


def _grow(owner: Any, grows: Mapping[str | int, Any], size: int) -> None:
    """Gives what differs in a message, or in a field of several values, the value of a size."""
    fields = hasattr(owner, "ListFields")
    for key, inner in grows.items():
        if isinstance(inner, dict):
            _grow(getattr(owner, str(key)) if fields else owner[key], inner, size)
        elif fields:
            setattr(owner, str(key), inner(size))
        else:
            owner[key] = inner(size)


def _grows(values: Values, sizes: Sizes, path: Path) -> Any:
    """What differs: of messages and of fields of several values by field, number or key, else a form; None where nothing does."""
    first, where = values[0], ".".join(map(str, path))
    if all(value == first for value in values):
        return None
    if hasattr(first, "ListFields"):
        parts = [{field.name: inner for field, inner in value.ListFields()} for value in values]
    elif isinstance(first, (str, bytes)) or not hasattr(first, "__len__"):
        return _leaf(values, sizes, where)
    else:
        parts = [dict(value) if hasattr(value, "keys") else dict(enumerate(value)) for value in values]
    if any(part.keys() != parts[0].keys() for part in parts):
        raise _unlike([sorted(part) for part in parts], sizes, where)
    grown = {key: _grows([part[key] for part in parts], sizes, (*path, key)) for key in parts[0]}
    return {key: inner for key, inner in grown.items() if inner is not None}


def _unlike(values: Values, sizes: Sizes, where: str) -> LoweringError:
    shown = (f"{str(value)[:_SHOWN].strip()!r} for {size} rows" for value, size in zip(values, sizes, strict=True))
    return LoweringError(f"{where or 'a value'} is {', '.join(shown)}; legal are numbers that grow by the same with every row")
