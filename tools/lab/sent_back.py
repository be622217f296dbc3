"""What a bring-up on NPUs sent back, as changes to review: parameters of the cost model, rows of dtypes, risks that held or did not."""

from __future__ import annotations

import difflib
import json
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...graphs.errors import SpecError
from ...lowering.ascend.cost import parameters as cost
from ...lowering.ascend.inventory import beside_table
from ...lowering.ascend.operators.table import BY_TYPE
from ...lowering.platform import CANN_RELEASES
from ..builder.targets import target
from ..prove.bringup.archive import NAME
from ..prove.bringup.collectives import COMBINE, DISPATCH
from ..prove.bringup.on_all_ranks import ASSUMED
from ..prove.bringup.report import JSON_NAME
from ..prove.bringup.results import COLLECTIVES, ENVIRONMENT
from ..prove.bringup.risks import ASSUMPTIONS

ROOT = Path(__file__).parents[2]
PARAMETERS = Path(cost.__file__).with_name("parameters.json")
PAGE = ROOT / "docs" / "on-hardware.md"
OUTCOMES = "## Outcomes"
LEAST = 0.05
"""Of a parameter: what changes less stays."""
_LATENCIES = {"collective_latency_s": False, "exchange_latency_s": True}
"""Parameters of fixed parts, and whether they are those of expert exchanges."""


@dataclass(frozen=True)
class SentBack:
    """The archive of a bring-up.

    Attributes:
        report: as `report.as_dict`.
        machine: versions and variables.
        tables: CANN's rows of kernels by operator type.
    """

    report: Mapping[str, Any]
    machine: Mapping[str, Any]
    tables: Mapping[str, Any]

    @property
    def chip(self) -> str:
        """In CANN's words."""
        return target(self.report["target"]).chip

    @property
    def source(self) -> str:
        """What a fact from it names."""
        cann, driver = self.machine.get("cann") or "?", self.machine.get("driver") or "?"
        return f"bring-up of {self.report['model']} {self.report['mesh']} on {self.chip}, CANN {cann}, driver {driver}"

    def rung(self, name: str) -> Mapping[str, Any]:
        """What a rung found; nothing where it did not run."""
        return next((rung for rung in self.report["rungs"] if rung["name"] == name), {"facts": {}, "timings": [], "failures": []})


def read(path: Path) -> SentBack:
    """Reads an archive.

    Raises:
        SpecError: it is none, or was not made on NPUs.
    """
    try:
        with tarfile.open(path) as archive:
            members = {member.name: file.read() for member in archive if (file := archive.extractfile(member))}
        report, machine = json.loads(members[JSON_NAME]), json.loads(members["machine.json"])
        tables = {kind: row for name, text in members.items() if name.startswith("ops-info/") for kind, row in json.loads(text).items()}
        sent, device = SentBack(report, machine, tables), report["device"]
    except (OSError, tarfile.TarError, ValueError, KeyError, TypeError, AttributeError):
        raise SpecError(f"{path} is no archive of a bring-up; legal is the {NAME} that it packs") from None
    if device != "npu":
        raise SpecError(f"{path} was made on {device}; legal is a bring-up on NPUs, whose facts are theirs")
    return sent


def measured_parameters(sent: SentBack) -> dict[str, tuple[float, str]]:
    """Parameters of the cost model that were measured otherwise, with what was."""
    rates, now = sent.rung(ENVIRONMENT)["facts"].get("rates", {}), cost.parameters(sent.chip)
    found: dict[str, tuple[float, str]] = {}
    for name, rate, unit in (("memory_fraction", "memory", "B/s"), ("bf16_fraction", "bf16 product", "op/s")):
        if rate in rates:
            found[name] = rates[rate]["measured"] / rates[rate]["nameplate"], f"{rates[rate]['measured']:.3g} {unit}"
    if "launch, replayed" in rates:
        value = rates["launch, replayed"]["measured"]
        found["vector_launch_s"] = value, f"{1e6 * value:.2f} us"
    for name, exchanged in _LATENCIES.items():
        timed = [timing for timing in sent.rung(COLLECTIVES)["timings"] if timing["estimate_s"] and _exchanges(timing["what"]) == exchanged]
        if timed:
            # The smallest is nearly all latency; bytes and doublings of ranks are as the model has them.
            least = min(timed, key=lambda timing: timing["moved_bytes"])
            value = getattr(now, name) + least["seconds"] - least["estimate_s"]
            if value > 0:
                found[name] = value, f"{1e6 * least['seconds']:.1f} us of {least['what']}, estimated {1e6 * least['estimate_s']:.1f}"
    return {name: (value, what) for name, (value, what) in found.items() if abs(value / getattr(now, name) - 1) > LEAST}


def _exchanges(what: str) -> bool:
    """Whether a timed collective sends tokens to experts, or back."""
    return any(BY_TYPE[kind].collective in (DISPATCH, COMBINE) for kind in _kinds(what))


def _kinds(what: str) -> set[str]:
    """Types of operators that a timing names."""
    return set(re.findall(r"\((\w+)\)", what)) & BY_TYPE.keys()


def risks(sent: SentBack) -> dict[str, list[str]]:
    """Assumptions of docs/on-hardware.md that were tried: of each what refuted it, nothing where it held."""
    tried: dict[str, list[str]] = {}
    for rung in sent.report["rungs"]:
        names = [ASSUMED[rung["name"]]] if rung["name"] in ASSUMED and rung["finished"] else []
        kinds = {kind for timing in rung["timings"] for kind in _kinds(timing["what"])}
        names += [BY_TYPE[kind].trial.wrong for kind in sorted(kinds)]
        for name in names:
            tried.setdefault(name, [])
        for failure in rung["failures"]:
            tried.setdefault(failure["assumption"], []).append(f"{failure['what']} {failure['code']}".rstrip())
    return {name: tried[name] for name in ASSUMPTIONS if name in tried}


def patch(sent: SentBack) -> str:
    """A unified diff of the parameters and of the page of risks, for `git apply`; "" where nothing changes."""
    before, page = PARAMETERS.read_text("utf-8"), PAGE.read_text("utf-8")
    lines = before.splitlines()
    for name, (value, what) in measured_parameters(sent).items():
        _set(
            lines,
            sent.chip,
            name,
            {"value": float(f"{value:.3g}"), "unit": cost.sources(sent.chip)[name]["unit"], "source": f"{sent.source}: {what}"},
        )
    return _diff(PARAMETERS, before, "\n".join(lines) + "\n") + _diff(PAGE, page, _with_outcome(page, _outcome(sent)))


def _set(lines: list[str], chip: str, name: str, entry: Mapping[str, Any]) -> None:
    """Gives a chip a parameter of its own, in the file's form of a line each."""
    start = lines.index(f' "{chip}": {{')
    end = next(i for i in range(start, len(lines)) if lines[i].startswith(" }"))
    text = f'  "{name}": {json.dumps(entry)}'
    for i in range(start + 1, end):
        if lines[i].startswith(f'  "{name}":'):
            lines[i] = text + "," * lines[i].endswith(",")
            return
    lines.insert(start + 1, text + ",")


def _outcome(sent: SentBack) -> str:
    passed = [rung["name"] for rung in sent.report["rungs"] if rung["passed"]]
    held = [name for name, against in risks(sent).items() if not against]
    refuted = [f"{name} ({', '.join(against)})" for name, against in risks(sent).items() if against]
    parts = (("passed", passed), ("held", held), ("refuted", refuted))
    return f"- {sent.source}: " + "; ".join(f"{what} {', '.join(names) or 'nothing'}" for what, names in parts) + "."


def _with_outcome(page: str, line: str) -> str:
    if OUTCOMES not in page:
        page = f"{page.rstrip()}\n\n{OUTCOMES}\n"
    return f"{page.rstrip()}\n{line}\n"


def _diff(path: Path, before: str, after: str) -> str:
    name = path.relative_to(ROOT)
    sides = (before.splitlines(keepends=True), after.splitlines(keepends=True))
    return "".join(difflib.unified_diff(*sides, f"a/{name}", f"b/{name}"))


def lines(sent: SentBack) -> Iterator[str]:
    """What the archive says, for whoever reviews the patch."""
    yield sent.source
    measured, now = measured_parameters(sent), cost.parameters(sent.chip)
    yield f"parameters that were measured otherwise: {len(measured)}"
    for name, (value, what) in measured.items():
        yield f"  {name} {getattr(now, name):.3g} to {value:.3g}: {what}"
    yield from _listed("slow dies", sent.rung(COLLECTIVES)["facts"].get("slow dies", []))
    if sent.tables:
        beside = beside_table(sent.tables, sent.chip, sent.machine.get("cann") or CANN_RELEASES[-1])
        yield f"rows of dtypes in CANN's table: {beside.rows - len(beside.absent)} of {beside.rows}"
        yield from _listed("operators that it lacks", beside.absent)
        yield from _listed("rows that it has otherwise", beside.wrong)
    tried = risks(sent)
    yield f"assumptions tried: {len(tried)} of {len(ASSUMPTIONS)}"
    yield from _listed("refuted", [f"{name}: {', '.join(against)}" for name, against in tried.items() if against])


def _listed(what: str, entries: Sequence[str]) -> Iterator[str]:
    if entries:
        yield f"{what}:"
        yield from (f"  {entry}" for entry in entries)
