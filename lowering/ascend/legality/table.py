"""The table of what operators of CANN and of packages and aclnn functions take, as records; its rows are in ../operators/legality."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....graphs.errors import LoweringError
from ...platform import CANN_RELEASES, OPERATOR_PACKAGES

CHIPS = ("ascend910_93", "ascend910b")
"""Chips that the table speaks of, by their names in CANN's operator definitions: Atlas A3 and Atlas A2."""
FORM, TYPES, DTYPES, FOLDED, RULE = "form", "types", "dtypes", "folded", "rule"
PLACE = "lowering/ascend/operators/legality"
"""Folder of the table's files, one a group of operators, as messages name it."""
_FOLDER = Path(__file__).parents[1] / "operators" / "legality"
KINDS = ("required", "optional", "dynamic")
"""How often an operator has an input or output: once, at most once, or as a list of any length."""
_KEYS: Mapping[str, frozenset[str]] = {
    FORM: frozenset({"inputs", "outputs", "attributes"}),
    TYPES: frozenset({"columns", "inputs", "outputs"}),
    DTYPES: frozenset({"inputs", "outputs"}),
    FOLDED: frozenset(),
    RULE: frozenset({"rule", "parameters"}),
}
_COMMON = frozenset({"operators", "what"})
_OPTIONAL = frozenset({"chips", "since", "until", "package", "when", "sizes", "read", "source", "assumed"})

Column = Mapping[str, str]
"""A legal combination: "dtype" or "dtype:NZ" by name of input; an output's name is preceded by "->"."""


@dataclass(frozen=True)
class Fact:
    """One row of the table.

    Attributes:
        number: its place in the table, from 0.
        operators: types of GE operators, aclnn functions and functions of packages that it is about.
        what: "form" (names of inputs, outputs and attributes), "types" (legal combinations of dtypes and formats), "dtypes" (what each
            operand may be, whatever the others are: an aclnn function casts them to one type), "folded" (GE computes it itself where
            all inputs are constants, so that no processor has to take their types) or "rule".
        chips: those that it holds for.
        since: oldest release of CANN that it holds for.
        until: newest release, or "" for all later ones.
        package: operator package that has to be installed for it to hold, or "".
        inputs, outputs: of a form, one of `KINDS` by name.
        attributes: of a form, type by name, as in CANN's REG_OP.
        columns: of types.
        dtypes: of dtypes; an operand that is left out may be of any.
        rule: name of a function in rules.py.
        parameters: of a rule.
        when: attributes of the operator that a rule is limited to, legal values by name.
        sizes: whether it limits sizes of a model that could be served; a model made small to be tested may break it.
        read: oldest release of CANN of which the source says it; "" where the source is of no release.
        source: repository, commit, path and release of CANN where it can be read; "" where it is assumed.
        assumed: why it is assumed although no public source says it; "" where there is a source.
    """

    number: int
    operators: tuple[str, ...]
    what: str
    chips: tuple[str, ...]
    since: str
    until: str
    package: str
    source: str
    assumed: str
    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, str] = field(default_factory=dict)
    columns: tuple[Column, ...] = ()
    dtypes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    rule: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    when: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    sizes: bool = False
    read: str = ""

    def holds(self, chip: str, cann: str, packages: Iterable[str]) -> bool:
        """Whether it holds for a chip and a release of CANN with operator packages."""
        released = release(self.since) <= release(cann) and (not self.until or release(cann) <= release(self.until))
        return chip in self.chips and released and (not self.package or self.package in packages)

    def assumption(self, cann: str) -> str:
        """Why it is an assumption under a release of CANN, or "" where its source covers that release.

        Limits (rules) that are read of a newer release are checked and count as no assumption: older releases take no more.
        """
        if self.assumed:
            return self.assumed
        older = self.what in (TYPES, DTYPES) and self.read and release(cann) < release(self.read)
        return f"it is as in CANN {self.read}, the oldest release of which it could be read: {self.source}" if older else ""


@dataclass(frozen=True)
class Table:
    """Facts by type of operator.

    Attributes:
        rows: all facts, in the order of the file.
    """

    rows: tuple[Fact, ...]

    @functools.cached_property
    def by_operator(self) -> Mapping[str, tuple[Fact, ...]]:
        """Facts of each type of operator."""
        facts: dict[str, list[Fact]] = {}
        for row in self.rows:
            for operator in row.operators:
                facts.setdefault(operator, []).append(row)
        return {operator: tuple(rows) for operator, rows in facts.items()}

    def facts(self, operator: str, chip: str, cann: str, packages: Iterable[str] = ()) -> tuple[Fact, ...]:
        """What is known of an operator on a chip under a release of CANN; empty where nothing is."""
        return tuple(fact for fact in self.by_operator.get(operator, ()) if fact.holds(chip, cann, packages))


@functools.cache
def table() -> Table:
    """The table that is part of this package."""
    return read(rows("facts"))


def rows(kind: str) -> list[dict[str, Any]]:
    """Rows of all groups of operators.

    Args:
        kind: "facts", of what runs, or "torch", of what runs a torch operator.
    """
    return [row for file in sorted(_FOLDER.glob("*.json")) for row in json.loads(file.read_text(encoding="utf-8"))[kind]]


def read(rows: Iterable[Mapping[str, Any]]) -> Table:
    """Reads and validates a table.

    Args:
        rows: as "facts" in the files of the table.

    Raises:
        LoweringError: a row lacks a field, has an unknown one, or has neither or both of a source and an assumption.
    """
    return Table(tuple(_fact(number, row) for number, row in enumerate(rows)))


def release(cann: str) -> tuple[int, ...]:
    """(8, 3) of "8.3", "8.3.RC1" and "8.3.0.alpha001": numbers of a release up to its second."""
    return tuple(int(part) for part in cann.split(".")[:2])


def _fact(number: int, row: Mapping[str, Any]) -> Fact:
    def wrong(message: str) -> LoweringError:
        return LoweringError(f"row {number} of the legality table ({row.get('operators')}, {row.get('what')}) {message}")

    what: str = row.get("what", "")
    if what not in _KEYS:
        raise wrong(f"is of no known kind; legal are {', '.join(_KEYS)}")
    required = _COMMON | _KEYS[what]
    if row.keys() - required - _OPTIONAL or required - row.keys():
        raise wrong(f"has the fields {sorted(row)}; legal are {sorted(required)}, and any of {sorted(_OPTIONAL)}")
    if bool(row.get("source")) == bool(row.get("assumed")):
        raise wrong("needs a source or the reason for which it is assumed, and not both")
    chips, since, until = tuple(row.get("chips", CHIPS)), row.get("since", CANN_RELEASES[0]), row.get("until", "")
    if not chips or set(chips) - set(CHIPS) or not {since, until} <= {"", *CANN_RELEASES} or not since:
        raise wrong(f"is for chips {chips} and releases {since!r} to {until!r}; legal are {CHIPS} and {CANN_RELEASES}")
    if row.get("package", "") not in ("", *OPERATOR_PACKAGES):
        raise wrong(f"is for package {row['package']!r}; legal are {OPERATOR_PACKAGES}")
    kinds = {*row["inputs"].values(), *row["outputs"].values()} if what == FORM else set()
    if kinds - set(KINDS):
        raise wrong(f"has inputs or outputs of kinds {sorted(kinds)}; legal are {KINDS}")
    return Fact(
        number=number,
        operators=tuple(row["operators"]),
        what=what,
        chips=chips,
        since=since,
        until=until,
        package=row.get("package", ""),
        source=row.get("source", ""),
        assumed=row.get("assumed", ""),
        inputs=row["inputs"] if what == FORM else {},
        outputs=row["outputs"] if what == FORM else {},
        attributes=row.get("attributes", {}),
        columns=_columns(row, wrong) if what == TYPES else (),
        dtypes={name: frozenset(text.split()) for name, text in _operands(row).items()} if what == DTYPES else {},
        rule=row.get("rule", ""),
        parameters=row.get("parameters", {}),
        when={name: tuple(values) for name, values in row.get("when", {}).items()},
        sizes=bool(row.get("sizes", False)),
        read=row.get("read", ""),
    )


def _columns(row: Mapping[str, Any], wrong: Any) -> tuple[Column, ...]:
    """Columns of a row whose entries are written as "a b c", one a column, or as "a" where all are equal."""
    entries = {name: text.split() for name, text in _operands(row).items()}
    if bad := [name for name, words in entries.items() if len(words) not in (1, row["columns"])]:
        raise wrong(f"has {row['columns']} columns, and another number of entries for {', '.join(bad)}; legal is as many, or one for all")
    return tuple({name: words[i % len(words)] for name, words in entries.items()} for i in range(row["columns"]))


def _operands(row: Mapping[str, Any]) -> dict[str, str]:
    """Entries of a row by the names that columns use."""
    return {**row["inputs"], **{f"->{name}": text for name, text in row["outputs"].items()}}
