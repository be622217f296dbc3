"""The view of `npucompile experts`: how unevenly ranks are loaded, by counts, as built and as planned, and what a step takes then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...graphs.errors import SpecError
from ...graphs.types import Mesh
from ...lowering.artifact.artifact import Artifact, GraphEntry
from ...lowering.ascend.shipped import shipped_graph
from ...models.expert_placement import Layer, by_default, with_experts
from ..artifact_model import full_model, spreads
from ..builder.expert_map import COUNT, MAP, ExpertMap, rows_of
from ..builder.expert_planner import imbalance, planned
from ..builder.targets import target
from .cost import step_cost
from .views import InspectView


@dataclass(frozen=True)
class ExpertPlan:
    """A placement, and what it comes to.

    Attributes:
        name: what is said of it.
        layers: of the layers that were counted.
        imbalance: tokens of the busiest rank over the mean.
        step_ms: estimated time of a step by the name of its bucket.
    """

    name: str
    layers: tuple[Layer, ...]
    imbalance: float
    step_ms: Mapping[str, float]


def plans(artifact: Artifact, counts: ExpertMap, copies: int | None) -> list[ExpertPlan]:
    """The experts as the artifact has them, planned, and planned with so many copies; by default one a rank.

    Times are those of the artifact's graphs with another imbalance: reading copies, where a step reads all experts, is not in them.

    Raises:
        SpecError: the file has no counts, or of another model; no experts are spread; or ranks cannot share so many.
    """
    manifest, model, mesh = artifact.manifest, full_model(artifact.manifest), Mesh.parse(artifact.manifest.mesh)
    ranks, logical = mesh.size, model.config.num_experts
    if not counts.counts:
        raise SpecError(f"{counts.name}: says where experts are, not how often each was chosen; legal is a file with {COUNT}")
    if not spreads(manifest) or ranks == 1:
        raise SpecError(f"{artifact.path} has no experts that ranks share; legal is an artifact of a mixture of experts for several ranks")
    more = -logical % ranks + ranks if copies is None else copies
    if more < 0 or (logical + more) % ranks:
        raise SpecError(f"{logical} experts and {more} copies on {ranks} ranks; legal is a sum that is a multiple of {ranks}")
    rows, groups, nodes = rows_of(counts, model), model.config.routing.groups, target(manifest.target).nodes(mesh)
    built = model.placement.layers if model.placement else (by_default(logical, logical),) * len(rows)
    own = built + (by_default(len(built[0]), logical),) * (len(rows) - len(built))
    chosen = {"as built": own[: len(rows)]}
    for number in dict.fromkeys((-logical % ranks, more)):
        chosen[f"planned, {number} copies"] = planned(rows, logical + number, ranks, groups=groups, nodes=nodes)
    found = []
    for name, layers in chosen.items():
        uneven = imbalance(layers, rows, ranks)
        times = {entry.bucket.name: step_cost(artifact, entry, imbalance=uneven).step_ms for entry in _largest(artifact)}
        found.append(ExpertPlan(name, layers, uneven, times))
    return found


def _largest(artifact: Artifact) -> list[GraphEntry]:
    """The bucket of each kind with the most tokens, of those that an NPU runs."""
    entries = [entry for entry in artifact.manifest.graphs if entry.compiled and shipped_graph(artifact, entry) is not None]
    return list({entry.bucket.kind: entry for entry in sorted(entries, key=lambda entry: entry.bucket.tokens)}.values())


def as_map(artifact: Artifact, layers: tuple[Layer, ...]) -> dict[str, Any]:
    """A placement in SGLang's form, with a row for each layer of the model; those without experts are placed by default."""
    model = full_model(artifact.manifest)
    has, _ = with_experts(model)
    rows, default = iter(layers), by_default(len(layers[0]), model.config.num_experts)
    return {MAP: [list(next(rows) if one else default) for one in has] + [list(row) for row in rows]}


def view(found: list[ExpertPlan]) -> InspectView:
    """A table of the plans."""
    buckets = list(found[0].step_ms)
    data = [{"name": plan.name, "imbalance": plan.imbalance, "step_ms": dict(plan.step_ms)} for plan in found]
    head = f"{'':<22} {'max/mean':>9}" + "".join(f" {name + ' ms':>24}" for name in buckets)
    lines = [f"{plan.name:<22} {plan.imbalance:>9.3f}" + "".join(f" {plan.step_ms[name]:>24.2f}" for name in buckets) for plan in found]
    return InspectView(data, (head, *lines))
