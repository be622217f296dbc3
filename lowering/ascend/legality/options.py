"""Compile options of GE graphs: those that GE and torchair know, and their legal values (options.json)."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

GRAPH, ENGINE = "graph", "engine"
"""Whom an option is told: GE with each graph ("local" in torchair's terms), or once in a process ("global")."""


def check_options(options: Mapping[str, str], engine: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Options that nobody knows, or with a value that is not legal: name, what is wrong and what is legal, source."""
    for level, given in ((GRAPH, options), (ENGINE, engine)):
        rows = {name: row for row in _rows() if row["level"] == level for name in row["options"]}
        for name, value in given.items():
            row = rows.get(name)
            if row is None:
                yield name, f"no such option of a {level} is known; legal are {', '.join(sorted(rows))}", "options.json"
            elif "values" in row and value not in row["values"]:
                yield name, f"is {value!r}; legal are {', '.join(map(repr, row['values']))}", row["source"]
            elif "pattern" in row and not re.fullmatch(row["pattern"], value):
                yield name, f"is {value[:80]!r}; legal is {row['pattern']}", row["source"]


@functools.cache
def _rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(resources.files(__package__).joinpath("options.json").read_text(encoding="utf-8"))["rows"]
    return rows
