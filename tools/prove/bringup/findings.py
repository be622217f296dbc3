"""The findings of a bring-up as they come, a JSON line each, so that whatever ends it loses none and the next one goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .results import ALL, BringupFinding, RungResult

NAME = "bringup.jsonl"
"""The first line says of what; a later line of a case replaces an earlier one."""


class Findings:
    """The findings of one bring-up.

    Args:
        path: of the file; None keeps none.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._found: dict[tuple[str, str], BringupFinding] = {}

    def begin(self, identity: Mapping[str, Any], *, resume: bool) -> int:
        """Starts the file; returns how many cases need not be judged again.

        Args:
            identity: what findings are of: artifact, device, versions.
            resume: takes over what passed in the file, if that is of the same.
        """
        earlier = read(self._path, identity) if resume and self._path else {}
        results = {rung: RungResult.of(rung, [f for (of, _), f in earlier.items() if of == rung]) for rung in ALL}
        # What a rung says of itself holds for all of its cases.
        self._found = {key: f for key, f in earlier.items() if not f.failures and (key[1] or results[key[0]].passed)}
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lines = [{"of": dict(identity)}, *map(asdict, self._found.values())]
            new = self._path.with_suffix(".new")
            new.write_text("".join(json.dumps(line) + "\n" for line in lines))
            new.replace(self._path)
        return sum(1 for _, case in self._found if case)

    def add(self, finding: BringupFinding) -> None:
        """Takes a finding."""
        self._found[finding.rung, finding.case] = finding
        if self._path:
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(finding)) + "\n")

    def judged(self, rung: str) -> frozenset[str]:
        """The cases of a rung that have been judged."""
        return frozenset(case for of, case in self._found if of == rung and case)

    def results(self) -> list[RungResult]:
        """What each rung that has run found."""
        of = {rung: [finding for (name, _), finding in self._found.items() if name == rung] for rung in ALL}
        return [RungResult.of(rung, found) for rung, found in of.items() if found]


def read(path: Path, identity: Mapping[str, Any]) -> dict[tuple[str, str], BringupFinding]:
    """The findings in a file, by rung and case; none if they are of something else. A line that was not finished counts as absent."""
    found: dict[tuple[str, str], BringupFinding] = {}
    lines = path.read_text().splitlines() if path.is_file() else []
    for number, line in enumerate(lines):
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if number == 0 and values.get("of") != identity:
            return {}
        if number:
            finding = BringupFinding.from_dict(values)
            found[finding.rung, finding.case] = finding
    return found
