"""The operators that a CANN registers with GE, read from its headers, beside the forms that graphs are checked against."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .legality.table import FORM, Fact, table

HEADERS = "opp/built-in/op_proto/inc"
"""Where a CANN has them (hiascend.com, graph development guide, operator prototype definition)."""
_OPERATOR = re.compile(r"\bREG_OP\(\s*(\w+)\s*\)(.*?)\.\s*OP_END_FACTORY_REG", re.DOTALL)
_PART = re.compile(r"\.\s*(OPTIONAL_INPUT|DYNAMIC_INPUT|INPUT|DYNAMIC_OUTPUT|OUTPUT|REQUIRED_ATTR|ATTR)\(\s*(\w+)")
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_KINDS = {"INPUT": "required", "OPTIONAL_INPUT": "optional", "DYNAMIC_INPUT": "dynamic", "OUTPUT": "required", "DYNAMIC_OUTPUT": "dynamic"}


@dataclass(frozen=True)
class Prototype:
    """One registered operator: "required", "optional" or "dynamic" by name of input and output, in order, and its attributes."""

    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    attributes: frozenset[str]


def registered(home: Path) -> dict[str, Prototype]:
    """The operators of a CANN by type; a later header replaces an earlier one.

    Raises:
        OSError: a header cannot be read.
    """
    return {kind: each for path in sorted((home / HEADERS).glob("*.h")) for kind, each in parsed(path.read_text("utf-8", "replace"))}


def parsed(text: str) -> Iterator[tuple[str, Prototype]]:
    """The operators of one header."""
    for match in _OPERATOR.finditer(_COMMENT.sub("", text)):
        parts = _PART.findall(match[2])
        inputs, outputs = ({name: _KINDS[what] for what, name in parts if what.endswith(end)} for end in ("INPUT", "OUTPUT"))
        yield match[1], Prototype(inputs, outputs, frozenset(name for what, name in parts if what.endswith("ATTR")))


def forms(chip: str, cann: str, packages: Iterable[str]) -> list[tuple[Fact, str]]:
    """The rows of CANN's own GE operators that hold, with each operator that a row is about."""
    rows = (fact for fact in table().rows if fact.what == FORM and not fact.package and fact.holds(chip, cann, packages))
    return [(fact, operator) for fact in rows for operator in fact.operators if not operator.startswith("aclnn")]


def difference(fact: Fact, theirs: Prototype) -> str:
    """What a graph of our form would be refused for; "" if nothing. Outputs are bound by their places, whatever a release calls them."""
    ours, inputs = fact.inputs, theirs.inputs
    asked = [name for name, kind in inputs.items() if kind == "required" and name not in ours]
    if asked or [name for name in inputs if name in ours] != [*ours]:
        return f"inputs {', '.join(ours)} beside {', '.join(inputs)}"
    if [*fact.outputs.values()] != [*theirs.outputs.values()][: len(fact.outputs)]:
        return f"outputs {', '.join(fact.outputs)} beside {', '.join(theirs.outputs)}"
    unknown = sorted(fact.attributes.keys() - theirs.attributes)
    return f"attributes {', '.join(unknown)} are not there" if unknown else ""
