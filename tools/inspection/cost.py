"""The view of `npucompile inspect --cost`: where the time of a step goes, by kind of layer, cause and operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...graphs.errors import SpecError
from ...graphs.types import Mesh
from ...lowering.artifact.artifact import Artifact, GraphEntry, Manifest
from ...lowering.ascend.acl_graph.file import AclFile
from ...lowering.ascend.cost.estimate import Lasting, OperatorCost, StepCost, estimate, timeline
from ...lowering.ascend.cost.parameters import Parameters, parameters, sources
from ...lowering.ascend.cost.timing import CAUSES
from ...lowering.ascend.ge_file import GeFile
from ...lowering.ascend.shipped import shipped_graph
from ...lowering.platform import Platform
from ..builder.targets import target
from . import views

_TOP = 20
"""Operators that the table lists; --json has all."""


def step_cost(artifact: Artifact, entry: GraphEntry, context: int | None = None, *, imbalance: float | None = None) -> StepCost:
    """The estimated time of a bucket's step.

    Args:
        context: cached tokens of each request; None is half of the longest the artifact serves.
        imbalance: rows of the busiest rank over the mean; None is what the chip's parameters say.

    Raises:
        SpecError: the bucket has no graph for NPUs, or the context is longer than the artifact serves.
    """
    return estimate(*_operands(artifact, entry, context, imbalance))


def step_timeline(artifact: Artifact, entry: GraphEntry, context: int | None = None) -> tuple[Lasting, ...]:
    """When each launch of that step runs; arguments and errors as of `step_cost`."""
    return timeline(*_operands(artifact, entry, context, None))


def _operands(
    artifact: Artifact, entry: GraphEntry, context: int | None, imbalance: float | None
) -> tuple[GeFile | AclFile, Parameters, Mesh, int, Platform]:
    manifest = artifact.manifest
    graph = shipped_graph(artifact, entry)
    if graph is None:
        state = f"compiled by {entry.compiled.backend}" if entry.compiled else "not compiled"
        raise SpecError(f"{entry.bucket.name} is {state}; --cost reads graphs built for NPUs (npucompile build --target ascend-a3)")
    most = manifest.limits.max_model_len
    if context is not None and not 0 < context <= most:
        raise SpecError(f"--context is {context}; legal is 1 to {most}, the longest request that the artifact serves")
    speeds, platform = parameters(chip_of(manifest)), Platform.of(manifest.platform)
    speeds = speeds if imbalance is None else replace(speeds, expert_imbalance=imbalance)
    return graph, speeds, Mesh.parse(manifest.mesh), context or most // 2, platform


def chip_of(manifest: Manifest) -> str:
    """The chip that an artifact was built for."""
    return Platform.of(manifest.platform).chip or target(manifest.target).chip


def bucket_facts(artifact: Artifact, entry: GraphEntry) -> dict[str, Any]:
    """`operators` and `launches` of a bucket, and the estimated part of `cost`; nothing where no NPU runs it."""
    if shipped_graph(artifact, entry) is None:
        return {}
    cost = step_cost(artifact, entry)
    shown = {name: value for name, value in cost.as_dict().items() if name not in ("kinds", "launches")}
    return {"operators": sum(entry.census.values()), "launches": cost.launches, "cost": dict(entry.cost) | shown}


def view(artifact: Artifact, entry: GraphEntry, context: int | None) -> views.InspectView:
    """The estimate as a table by kind of layer and cause, and the operators that take longest.

    Raises:
        SpecError: see `step_cost`.
    """
    cost = step_cost(artifact, entry, context)
    data = {"bucket": entry.bucket.name, "operators": sum(entry.census.values())} | cost.as_dict() | {"parameters": sources(cost.chip)}
    return views.InspectView(data, tuple(lines(entry.bucket.name, cost)))


def lines(bucket: str, cost: StepCost) -> list[str]:
    """The tables of one bucket."""
    cached = "" if bucket.startswith("encode-") else f", {cost.context} cached tokens a request"
    head = (
        f"{bucket} on {cost.chip}{cached}: {cost.step_ms:.2f} ms a step (estimate); "
        f"{cost.hbm_bytes / 1e9:,.2f} GB of HBM, at the nameplate rate {cost.floor_ms:.2f} ms; {cost.sent_bytes / 1e6:,.1f} MB received"
    )
    kinds = cost.kinds
    rows: list[tuple[str, int, Mapping[str, float]]] = [
        (f"{kind} x {cost.bodies[kind]}" if cost.bodies[kind] > 1 else kind, sum(c.launches for c in costs), _sum(costs))
        for kind, costs in kinds.items()
    ]
    if cost.parts_ms["waiting"] > 0.005:
        rows.append(("(nothing runs)", 0, {"waiting": cost.parts_ms["waiting"]}))
    rows.append(("all", cost.launches, cost.parts_ms))
    share = {cause: 100 * ms / cost.step_ms for cause, ms in cost.parts_ms.items()}
    table = [*_table("ms by layer", rows), _line("% of the step", "", 100.0, share, _width("ms by layer", rows))]
    slowest = sorted(cost.operators, key=lambda operator: -operator.total_ms)[:_TOP]
    operators = [(f"{operator.kind} {operator.type}", operator.launches, operator.parts_ms) for operator in slowest]
    slower = ", ".join(f"{ms:.2f} ms with {factor:g} times their time" for factor, ms in cost.contended_ms.items())
    streams = [f"stream {label}: {stream['launches']:,} launches, {stream['busy_ms']:.2f} ms" for label, stream in cost.streams.items()]
    beside = [*streams, f"if kernels were slower beside an exchange: {slower}"] if len(streams) > 1 else []
    return [head, *beside, "", *table, "", *_table("ms by operator", operators)]


def _sum(costs: Sequence[OperatorCost]) -> dict[str, float]:
    return {cause: sum(cost.parts_ms.get(cause, 0.0) for cost in costs) for cause in CAUSES}


def _width(title: str, rows: Sequence[tuple[str, int, Mapping[str, float]]]) -> int:
    return max(len(title), *(len(name) for name, _, _ in rows), 14)


def _table(title: str, rows: Sequence[tuple[str, int, Mapping[str, float]]]) -> list[str]:
    width = _width(title, rows)
    head = f"{title:<{width}} {'launches':>9} {'total':>9}" + "".join(f" {cause:>11}" for cause in CAUSES)
    return [head, *(_line(name, f"{count:,}" if count else "", sum(parts.values()), parts, width) for name, count, parts in rows)]


def _line(name: str, count: str, total: float, parts: Mapping[str, float], width: int) -> str:
    cells = "".join(f" {parts[cause]:>11.2f}" if parts.get(cause, 0.0) >= 0.005 else f" {'':>11}" for cause in CAUSES)
    return f"{name:<{width}} {count:>9} {total:>9.2f}{cells}".rstrip()
