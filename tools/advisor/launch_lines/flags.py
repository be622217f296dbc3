"""Reads the words behind a launch command into flags and values, as argparse does, and vLLM's parser on top of it."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .tables import ProgramFlags, Row, of_topic

_NUMBER = re.compile(r"-\d+$|-\d*\.\d+$")
_SIZES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")


@dataclass(frozen=True)
class GivenFlag:
    """A flag as it is given.

    Attributes:
        name: as it was typed; "" for a word that belongs to no flag.
        row: None where it is unknown or ambiguous.
        texts: its values as text.
        value: the same read by the row's kind: a bool, number, text, JSON value or list of them; None where it cannot be read.
        problem: why it cannot be read; "" where it can.
    """

    name: str
    row: Row | None
    texts: tuple[str, ...] = ()
    value: Any = None
    problem: str = ""


def read_flags(words: Sequence[str], engine: ProgramFlags) -> list[GivenFlag]:
    """Reads words into flags, in order; words that belong to no flag are among them, the model that comes first as `model`."""
    given: list[GivenFlag] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not _is_flag(word):
            given.append(GivenFlag("", None, (word,), word))
            continue
        name, equals, attached = word.partition("=")
        row, positive, problem = _find(name, engine)
        if row is None and "." in name and engine.dashes:
            row, _, problem = _find(name.partition(".")[0], engine)
            if row is not None:
                taken = [attached] if equals else list(words[at : at + 1])
                at += 0 if equals else 1
                given.append(_keyed(name, row, taken))
                continue
        if row is None and engine.dashes and word.startswith("-O"):
            # vLLM writes the level of optimization as compilers do: -O3, -O=3 or -O 3.
            row, positive, problem, name, attached = of_topic("--optimization-level"), True, "", "-O", word[2:].removeprefix("=")
            equals = "=" if attached else ""
        short = row is None and not word.startswith("--") and word[:2] in engine.flags
        if short:
            row, positive, problem, attached, equals = engine.flags[word[:2]], True, "", word[2:].removeprefix("="), "="
            name = word[:2]
        if row is None:
            values, at = _values(words, at, (0, None)) if not equals else ((attached,), at)
            given.append(GivenFlag(name, None, tuple(values), None, problem))
            continue
        values, at = ((attached,), at) if equals else _values(words, at, row.count)
        given.append(_read(name, row, tuple(values), positive))
    return given


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word.startswith("-") and not _NUMBER.match(word) and " " not in word.partition("=")[0]


def _values(words: Sequence[str], at: int, count: tuple[int, int | None]) -> tuple[tuple[str, ...], int]:
    """Words up to the next flag, at most as many as a flag takes."""
    most = count[1]
    end = at
    while end < len(words) and (most is None or end - at < most) and not _is_flag(words[end]):
        end += 1
    return tuple(words[at:end]), end


def _find(name: str, engine: ProgramFlags) -> tuple[Row | None, bool, str]:
    """The row that a name stands for, whether it turns it on, and what is wrong where there is none.

    A name may be shortened to what no other one begins with; names of earlier releases count only where no newer one fits.
    """
    flags = engine.flags
    spelt = name.replace("_", "-") if engine.dashes and name.startswith("--") else name
    if spelt in flags:
        return flags[spelt], _turns_on(spelt, flags[spelt]), ""
    for old in (False, True):
        fitting = [full for full, row in flags.items() if len(spelt) > 2 and full.startswith(spelt) and row.old == old]
        rows = {id(flags[full]): full for full in fitting}
        if len(rows) == 1:
            full = fitting[0]
            return flags[full], _turns_on(full, flags[full]), ""
        if rows:
            return None, True, f"{name} may be {_either(sorted(fitting))}; write it out"
    row = Row((name,), "str*&", "router") if engine.name == "router" else None if "." in name else of_topic(spelt)
    if row is not None:
        return row, True, ""
    near = difflib.get_close_matches(spelt.replace("_", "-"), flags, n=1, cutoff=0.6)
    return None, True, f"{engine.name} has no flag {name}" + (f"; the nearest is {near[0]}" if near else "")


def _turns_on(name: str, row: Row) -> bool:
    """Whether a name turns its switch on: `--no-` turns it off, and so does `--disable-x` where the switch is `--enable-x`."""
    if row.kind != "switch":
        return True
    off = name.startswith("--no-") and name not in row.names
    bare = f"--{name[5:]}" if off else name
    pair = {"--enable-", "--disable-"}
    inverse = {next((each for each in pair if one.startswith(each)), "") for one in (bare, row.name)} == pair
    return off == inverse


def _either(names: Sequence[str]) -> str:
    shown = names[:6]
    return ", ".join(shown[:-1]) + f" or {shown[-1]}" + (f" ({len(names) - 6} more)" if len(names) > 6 else "")


def _read(name: str, row: Row, texts: tuple[str, ...], positive: bool) -> GivenFlag:
    fewest, _ = row.count
    if row.type in ("flag", "switch"):
        if texts:
            return GivenFlag(name, row, texts, None, f"{name} takes no value, here it has {texts[0]!r}")
        return GivenFlag(name, row, (), positive)
    if len(texts) < fewest:
        return GivenFlag(name, row, texts, None, f"{name} has no value; it takes {_described(row)}")
    try:
        values = [_typed(text, row.type) for text in texts]
    except ValueError:
        return GivenFlag(name, row, texts, None, f"{name} takes {_described(row)}, here it has {' '.join(texts)!r}{_unknown(texts)}")
    return GivenFlag(name, row, texts, values if row.count[1] is None else values[0] if values else True)


def _unknown(texts: Sequence[str]) -> str:
    """Which variables values need whose own values the script does not say, and how to say them."""
    text = " ".join(texts)
    computed = "".join(re.findall(r"\$\(\((.*?)\)\)", text))
    names = list(dict.fromkeys([*re.findall(r"\$[{!#]*([A-Za-z_]\w*|\d)", text), *re.findall(r"(?<![\w$])[A-Za-z_]\w*", computed)]))
    if names:
        return f"; the script does not say {', '.join(f'${each}' for each in names)} (--set {names[0]}=VALUE does)"
    if "$(" in text or "`" in text:
        return "; that is the output of a command, and none is run: --set says the variable that it becomes"
    return f"; write a value for {text}" if text.startswith("<") else ""


def _described(row: Row) -> str:
    nouns = {"int": "a whole number", "float": "a number", "size": "a number such as 4096 or 32k", "json": "JSON", "str": "a value"}
    return nouns[row.type] + (" or several" if row.count[1] is None else "")


def _typed(text: str, kind: str) -> Any:
    if kind == "int":
        return int(text)
    if kind == "float":
        return float(text)
    if kind == "size":
        match = _SIZE.fullmatch(text.strip())
        return int(float(match[1]) * _SIZES[match[2]]) if match else -1 if text.lower() == "auto" else int(text)
    return json.loads(text) if kind == "json" else text


def _keyed(name: str, row: Row, texts: Sequence[str]) -> GivenFlag:
    """`--flag.key.inner value`, a piece of JSON."""
    if not texts:
        return GivenFlag(name, row, (), None, f"{name} has no value")
    value: Any = _json_or_text(texts[0])
    keys = name.partition(".")[2].split(".")
    if keys[-1].endswith("+"):
        keys[-1], value = keys[-1][:-1], [_json_or_text(part) for part in texts[0].split(",")]
    for key in reversed(keys):
        value = {key: value}
    return GivenFlag(name, row, tuple(texts), value)


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
