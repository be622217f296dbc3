"""The flags and variables of SGLang, vLLM and vllm-ascend by name, and what becomes of each; the tables are the JSON files beside this one.

A row has `names`, for flags a `kind` of values, and says what becomes of it in one of three ways: `topic` (an entry of topics.json, the
same words for all its flags), `carry` (an option of serve with the same meaning, "serve --x", or "env" for a variable that is set as it
is), or `rule` (a function of rules.py that reads the value). A row without any is that of an option of serve which has its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from ..serve.options import OPTIONS

_SERVED = {name: option.option for option in OPTIONS for name in (f"--{option.option}", *option.same)}
"""Options of serve by every name of theirs."""

KINDS = {"flag": (0, 0), "switch": (0, 0), "1": (1, 1), "": (1, 1), "?": (0, 1), "*": (0, None), "+": (1, None)}
"""Fewest and most values of a flag, by the last character of its kind where that is no letter; None is no limit."""


@dataclass(frozen=True)
class Topic:
    """What becomes of all flags of one subject: "unnecessary" or "refused", and why."""

    status: str
    why: str


@dataclass(frozen=True)
class Row:
    """A flag or a variable.

    Attributes:
        names: all its names, for flags with their dashes.
        kind: type of its values ("str", "int", "float", "size", "json"), or "flag", or "switch" for one that has a `--no-` form; then "?",
            "*", "+" or "1" as argparse's `nargs` has them, and "&" where repeating it adds to it.
        neutral: values with which it asks for what is so here in any case.
        off: topic of a switch that is turned off; without one it then asks for what is so here.
        values: our value for each of theirs, of a flag that is carried.
        old: whether the newest release does not know it.
    """

    names: tuple[str, ...]
    kind: str = "str"
    topic: str = ""
    carry: str = ""
    rule: str = ""
    neutral: tuple[str, ...] = ()
    off: str = ""
    values: Mapping[str, str] = field(default_factory=dict, hash=False)
    old: bool = False

    @property
    def name(self) -> str:
        """Its first name."""
        return self.names[0]

    @property
    def type(self) -> str:
        """Type of its values."""
        return self.kind.rstrip("?*+1&")

    @property
    def repeats(self) -> bool:
        """Whether every occurrence counts, and not only the last one."""
        return self.kind.endswith("&")

    @property
    def count(self) -> tuple[int, int | None]:
        """Fewest and most values that follow it."""
        if self.type in ("flag", "switch"):
            return 0, 0
        kind = self.kind.rstrip("&")
        return KINDS[kind[-1] if kind[-1] in "?*+1" else ""]


@dataclass(frozen=True)
class Engine:
    """The flags of one program.

    Attributes:
        dashes: whether it takes underscores in names for dashes, and `--flag.key value` for a key of JSON.
    """

    name: str
    rows: tuple[Row, ...]
    dashes: bool = False

    @cached_property
    def flags(self) -> Mapping[str, Row]:
        """Rows by every name, those of the newest release first; `--no-` forms included."""
        named: dict[str, Row] = {}
        for row in sorted(self.rows, key=lambda row: row.old):
            for name in row.names:
                named.setdefault(name, row)
        for row in self.rows:
            for name in row.names if row.kind == "switch" else ():
                if name.startswith("--"):
                    named.setdefault(f"--no-{name[2:]}", row)
        return named


@cache
def engine(name: str) -> Engine:
    """The engine of that name: "sglang", "vllm" or "router"."""
    return Engine(name, _rows(f"{name}.json"), dashes=name == "vllm")


@cache
def variables() -> Mapping[str, Row]:
    """Environment variables by name."""
    return {row.name: row for row in _rows("variables.json")}


@cache
def topics() -> Mapping[str, Topic]:
    """Topics by name."""
    return {name: Topic(**fields) for name, fields in _read("topics.json").items()}


def _rows(file: str) -> tuple[Row, ...]:
    rows = []
    for fields in _read(file)["rows"]:
        lists = {name: tuple(fields[name]) for name in ("names", "neutral") if name in fields}
        row = Row(**(fields | lists))
        served = next((_SERVED[name] for name in row.names if name in _SERVED), "") if not (row.topic or row.rule or row.carry) else ""
        rows.append(replace(row, carry=f"serve --{served}") if served else row)
    return tuple(rows)


def _read(file: str) -> Any:
    return json.loads(Path(__file__).with_name(file).read_text(encoding="utf-8"))
