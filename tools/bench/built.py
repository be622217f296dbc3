"""What builds of published deployments came to: graphs, memory of a rank, and what differs from the published rows, as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...graphs.errors import SpecError
from ...lowering.artifact.artifact import Artifact, GraphEntry
from ...lowering.ascend.cost.estimate import StepCost
from ..build.deployments import Deployment, Phase, deployments, limits_for
from ..build.deviations import deviations, source_of, why_not
from ..build.memory import GIB
from ..build.targets import target
from .prediction import named_row
from .report import Column, Table, Value, as_markdown

_GRAPHS = (
    Column("deployment", "deployment"),
    Column("mesh", "mesh"),
    Column("weights", "weights"),
    Column("graph", "graph"),
    Column("operators", "operators"),
    Column("launches", "launches"),
    Column("step_ms", "step ms", 1),
)
_PARTS = {
    "expert weights": "experts",
    "other weights": "other weights",
    "draft head": "draft head",
    "KV pages": "KV pages",
    "state slots": "state slots",
    "activations": "activations",
    "workspace": "workspace",
    "communication": "communication",
}
"""Parts of a rank's memory that the table shows, and their headings; the rest is too small to matter, or what the runtime reserves."""

_MEMORY = (
    Column("deployment", "deployment"),
    *(Column(name, heading) for name, heading in _PARTS.items()),
    Column("total", "total", 1),
    Column("limit", "of", 0),
)


@dataclass(frozen=True)
class Built:
    """A build of one phase of a deployment.

    Attributes:
        graphs: of each graph its operators and the estimated cost of a step.
    """

    row: Deployment
    phase: Phase
    artifact: Artifact
    graphs: Sequence[tuple[GraphEntry, StepCost]]

    @property
    def name(self) -> str:
        """The deployment, with the phase where it has several."""
        return self.row.id if self.phase.name == "mixed" else f"{self.row.id}, {self.phase.name}"


def phase_of(artifact: Artifact) -> Phase:
    """The phase of its deployment that an artifact was built for.

    Raises:
        SpecError: it was built for no deployment.
    """
    row, arguments = named_row(artifact), list(artifact.manifest.build_arguments)
    return row.phase(arguments[arguments.index("--phase") + 1] if "--phase" in arguments else "mixed")


def context_for(row: Deployment) -> int | None:
    """Cached tokens of a request in the middle of its output; None where no lengths are published."""
    return None if row.input_len is None or row.output_len is None else row.input_len + row.output_len // 2


def report(built: Iterable[Built]) -> str:
    """Markdown: a table of graphs, one of a rank's memory, what differs from the published rows, and what cannot be built.

    Raises:
        SpecError: there are two builds of one phase.
    """
    order = {(row.id, name): None for row in deployments().values() for name in row.phases}
    by_phase: dict[tuple[str, str], Built] = {}
    for each in built:
        first = by_phase.setdefault((each.row.id, each.phase.name), each)
        if first is not each:
            paths = f"{first.artifact.path} and {each.artifact.path}"
            raise SpecError(f"{paths} are both of {each.name}; legal is one of each deployment and phase")
    listed = [by_phase[key] for key in order if key in by_phase]
    parts = (
        as_markdown(Table("graphs", "Graphs", _GRAPHS, tuple(line for each in listed for line in _graph_lines(each)))),
        as_markdown(Table("memory", "Memory of a rank in GiB", _MEMORY, tuple(_memory_line(each) for each in listed))),
        "\n".join(["**What differs from the published rows**", "", *_deviation_lines(listed)]) + "\n",
        "\n".join(["**Not built**", "", *_missing_lines(by_phase)]) + "\n",
    )
    return "\n".join(parts)


def _graph_lines(built: Built) -> list[Mapping[str, Value]]:
    return [
        {
            "deployment": built.name,
            "mesh": built.artifact.manifest.mesh,
            "weights": built.row.quantization,
            "graph": entry.bucket.name,
            "operators": sum(entry.census.values()),
            "launches": cost.launches,
            "step_ms": cost.step_ms,
        }
        for entry, cost in sorted(built.graphs, key=lambda pair: pair[0].bucket)
    ]


def _memory_line(built: Built) -> Mapping[str, Value]:
    plan = built.artifact.manifest.memory
    sizes = {str(part["name"]): int(part["nbytes"]) for part in plan["parts"]}
    shown = {name: sizes[name] / GIB if sizes[name] else None for name in _PARTS}
    return {"deployment": built.name, **shown, "total": sum(sizes.values()) / GIB, "limit": plan["limit_bytes"] / GIB}


def _deviation_lines(listed: Iterable[Built]) -> list[str]:
    """Each deviation with the builds that have it."""
    names: dict[str, list[str]] = {}
    for each in listed:
        for line in (*deviations(each.row, each.phase, source_of(each.row)), *_pool_lines(each)):
            names.setdefault(line, []).append(each.name)
    return [f"- {line}: {'; '.join(of)}" for line, of in names.items()]


def _pool_lines(built: Built) -> list[str]:
    limits, page = built.artifact.manifest.limits, target(built.row.target).page_size
    wanted = limits_for(built.row, built.phase, page).num_pages
    if limits.num_pages >= wanted:
        return []
    return [f"{(limits.num_pages - 1) * page} cached tokens a dp group, where all its requests at full length take {(wanted - 1) * page}"]


def _missing_lines(by_phase: Mapping[tuple[str, str], Built]) -> list[str]:
    missing: dict[str, list[str]] = {}
    for row in deployments().values():
        absent = [name for name in row.phases if (row.id, name) not in by_phase]
        if absent or not row.phases:
            missing.setdefault(why_not(row) or "not among these builds", []).append(row.id)
    return [f"- {why}: {', '.join(ids)}" for why, ids in missing.items()]
