"""Public reports of operators, graphs and collectives that a device refused or computed wrongly; read from `threads.json`."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from ....graphs.errors import LoweringError

ANSWERED = ("error", "wrong numbers", "hang")
"""How a device answered."""
_FILE = Path(__file__).with_name("threads.json")


@dataclass(frozen=True)
class ThreadSource:
    """The operator whose output an input is.

    Attributes:
        operator: its GE type.
        output: number of the output.
        attributes: by GE's names; those that are left out have their defaults.
    """

    operator: str
    output: int
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class Given:
    """What the device was given.

    Attributes:
        text: in words, as far as the thread says.
        inputs: type of each input by GE's name, as `ge_types.TensorType` writes it; empty where `text` is all there is.
        attributes: by GE's names; those that are left out have their defaults.
        sources: where inputs come from, if that matters.
        beside: types of other operators of the graph that no data orders against this one, if that matters.
        filled: which of it the thread does not say, so that the operator can be built.
    """

    text: str
    inputs: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, ThreadSource] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    filled: tuple[str, ...] = ()


@dataclass(frozen=True)
class Thread:
    """One report; its row leaves out what its thread does not say.

    Attributes:
        id: short name.
        link: of the thread; `also` are others that say the same.
        stack: what ran, and its version.
        chip: by CANN's name; None where the thread does not say.
        cann: release; None where the thread does not say.
        operator: GE type, or the name that the thread uses.
        answered: one of `ANSWERED`.
        given: what the device was given.
        answer: its essential words.
        meaning: what is illegal, in one sentence.
        way_out: what works instead.
        refused_by: the rule of the table that refuses the same, or "types" for its columns of dtypes; None where no graph can get there.
        not_applicable: why not, where `refused_by` is None.
    """

    id: str
    link: str
    stack: str
    operator: str
    answered: str
    given: Given
    answer: str
    meaning: str
    way_out: str
    also: tuple[str, ...] = ()
    chip: str | None = None
    cann: str | None = None
    refused_by: str | None = None
    not_applicable: str | None = None


@functools.cache
def threads() -> tuple[Thread, ...]:
    """All reports, in the order of the file.

    Raises:
        LoweringError: as `read` does.
    """
    return read(json.loads(_FILE.read_text())["rows"])


def read(rows: list[dict[str, Any]]) -> tuple[Thread, ...]:
    """Reports from the rows of the file.

    Raises:
        LoweringError: a row has other fields, says neither which rule refuses it nor why none has to, or has the name or a link of
            another.
    """
    found = tuple(_thread(row) for row in rows)
    _unique("name", [thread.id for thread in found])
    _unique("link", [link for thread in found for link in (thread.link, *thread.also)])
    return found


def answered(rule: str, operator: str) -> str:
    """The reports of devices that a rule refuses of a type of operator, to be added to its source; "" where there is none."""
    links = [thread.link for thread in threads() if (thread.refused_by, thread.operator) == (rule, operator)]
    return f"; see what devices answered: {', '.join(links)}" if links else ""


def _thread(row: Mapping[str, Any]) -> Thread:
    legal = {each.name for each in fields(Thread)}
    missing = {each.name for each in fields(Thread) if each.default is MISSING} - set(row)
    if missing or set(row) - legal:
        raise LoweringError(f"row {row.get('id')!r} lacks {sorted(missing)} and has {sorted(set(row) - legal)}; legal are {sorted(legal)}")
    thread = Thread(**{**row, "also": tuple(row.get("also", ())), "given": _given(row["given"])})
    if thread.answered not in ANSWERED:
        raise LoweringError(f"row {thread.id}: answered is {thread.answered!r}; legal are {', '.join(ANSWERED)}")
    if (thread.refused_by is None) == (thread.not_applicable is None):
        raise LoweringError(f"row {thread.id} has both or neither of refused_by and not_applicable; legal is one of them")
    if thread.refused_by and not thread.given.inputs:
        raise LoweringError(
            f"row {thread.id} is refused by {thread.refused_by} and gives no inputs; legal is what an operator can be built of"
        )
    empty = [each.name for each in fields(Thread) if getattr(thread, each.name) == ""]
    if empty or not thread.given.text:
        raise LoweringError(f"row {thread.id} says nothing in {empty or ['given.text']}; legal is to leave out what is not said")
    return thread


def _given(row: Mapping[str, Any]) -> Given:
    sources = {slot: ThreadSource(**source) for slot, source in row.get("sources", {}).items()}
    return Given(**{**row, "sources": sources, "beside": tuple(row.get("beside", ())), "filled": tuple(row.get("filled", ()))})


def _unique(what: str, values: list[str]) -> None:
    if twice := sorted({value for value in values if values.count(value) > 1}):
        raise LoweringError(f"the {what} {', '.join(twice)} is in two rows; legal is one row for each")
