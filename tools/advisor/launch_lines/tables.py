"""The flags and variables of SGLang, vLLM and vllm-ascend by name, and what becomes of each; the tables are the JSON files beside this one.

Most are nothing of ours, and a topic of topics.json says why for all its names: `names` has them whole, or as words that end in a dash or
an underscore ("--hicache-" begins a name, "-lora-" stands anywhere in it). Others have a row: `names`, for flags a `kind` of values, and
what becomes of it: `carry` (an option of serve with the same meaning, "serve --x", or "env" for a variable that is set as it is), `rule`
(a function of rules.py that reads the value), or a `topic` where some values are neutral or engines differ. A row without any is that of
an option of serve which has its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from ...serve.options import OPTIONS

_SERVED = {name: option.option for option in OPTIONS for name in (f"--{option.option}", *option.same)}
"""Options of serve by every name of theirs."""

KINDS = {"flag": (0, 0), "switch": (0, 0), "1": (1, 1), "": (1, 1), "?": (0, 1), "*": (0, None), "+": (1, None)}
"""Fewest and most values of a flag, by the last character of its kind where that is no letter; None is no limit."""


OWN = ("SGLANG_", "SGL_", "VLLM_")
"""Beginnings of the engines' own variables."""

_TURNED = re.compile("--(enable|disable)-")


@dataclass(frozen=True)
class Topic:
    """What becomes of all flags and variables of one subject: "unnecessary" or "refused", and why.

    Attributes:
        names: of flags and variables, whole or as words in them, with blanks between.
    """

    status: str
    why: str
    names: str = ""


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
        old: whether the newest release may not know it.
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
class ProgramFlags:
    """The flags of one program.

    Attributes:
        dashes: whether it takes underscores in names for dashes, and `--flag.key value` for a key of JSON.
    """

    name: str
    rows: tuple[Row, ...]
    dashes: bool = False

    @cached_property
    def flags(self) -> Mapping[str, Row]:
        """Rows by every name that is known whole, those of the newest release first; `--no-` forms included."""
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
def engine(name: str) -> ProgramFlags:
    """The engine of that name: "sglang", "vllm" or "router"."""
    if name == "router":
        return ProgramFlags(name, ())
    rows = _rows(f"{name}.json")
    known = {each for row in rows for each in row.names}
    others = [of_topic(each) for each in _named(whole=True) if each.startswith("-") and each not in known]
    return ProgramFlags(name, (*rows, *filter(None, others)), dashes=name == "vllm")


@cache
def variables() -> Mapping[str, Row]:
    """Environment variables that are known whole, by name."""
    whole = {name: Row((name,), topic=topic) for name, topic in _named(whole=True).items() if not name.startswith("-")}
    return whole | {row.name: row for row in _rows("variables.json")}


@cache
def topics() -> Mapping[str, Topic]:
    """Topics by name."""
    return {name: Topic(**fields) for name, fields in _read("topics.json").items()}


@cache
def of_topic(name: str) -> Row | None:
    """The row of a flag or variable that a topic has whole, or by the longest of words in it; None where none has.

    Its values are not read. `--no-x` and `--disable-x` ask for nothing where a topic refuses `--x` and `--enable-x`.
    """
    whole, anywhere, bare = _named(whole=True), _named(whole=False), name.replace("--no-", "--", 1)
    other = _TURNED.sub(lambda turned: f"--{'disable' if turned[1] == 'enable' else 'enable'}-", bare)
    known = next((each for each in (name, bare, other) if each in whole), "")
    words = max(filter(partial(_has, bare), anywhere), key=lambda words: (len(words), words), default="")
    topic = whole.get(known) or anywhere.get(words, "")
    if not topic:
        return None
    off = name != known and (name != bare) != bare.startswith("--disable-") and topics()[topic].status == "refused"
    return Row((known or bare,), "str*&", topic, neutral=("",) if off else (), old=True)


def _has(name: str, words: str) -> bool:
    """Whether a name has words; variables that are not the engines' own have them only at their beginning."""
    if words.startswith("_") or (words.startswith("-") and not words.startswith("--")):
        return words in name + words[-1] and (words[0] == "-" or name.startswith(OWN))
    return (name + words[-1]).startswith(words)


@cache
def _named(whole: bool) -> Mapping[str, str]:
    """Topics by the names that they have whole, or by the words that stand for all names with them."""
    return {name: topic for topic, entry in topics().items() for name in entry.names.split() if (name[-1] not in "-_") == whole}


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
