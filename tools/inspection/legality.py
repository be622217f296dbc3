"""The views of `npucompile inspect` on what CANN takes: what is illegal in a bucket, and what is assumed without a source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ...graphs.errors import SpecError
from ...lowering.artifact.artifact import Artifact, GraphEntry
from ...lowering.ascend.legality import check
from ...lowering.ascend.legality.assumptions import assumptions
from ...lowering.ascend.legality.check import CheckedGraph
from ...lowering.ascend.shipped import shipped_graph
from ...lowering.platform import Platform
from . import views


def illegal(artifact: Artifact, entry: GraphEntry) -> dict[str, Any]:
    """`illegal`: what CANN would refuse of a bucket, each kind once with the number of its operators; nothing where no NPU runs it."""
    checked = _checked(artifact, entry)
    if checked is None:
        return {}
    return {"illegal": [asdict(violation) | {"operators": operators} for violation, operators in checked.pairs()]}


def _checked(artifact: Artifact, entry: GraphEntry) -> CheckedGraph | None:
    """What the check of a bucket's graph found; None where it has none for NPUs."""
    platform = Platform.of(artifact.manifest.platform)
    graph = shipped_graph(artifact, entry)
    return check.examine(graph, platform) if graph else None


def assumed(artifact: Artifact, entries: Sequence[GraphEntry]) -> views.InspectView:
    """Rows of the legality table without a source for the artifact's release of CANN, and how many operators rely on each.

    Raises:
        SpecError: no bucket has a graph for NPUs.
    """
    checked = [found for entry in entries if (found := _checked(artifact, entry)) is not None]
    if not checked:
        raise SpecError(f"{artifact.path} has no graphs for NPUs, of which --assumptions tells; legal is a build with --target ascend-a3")
    platform = Platform.of(artifact.manifest.platform)
    rows = assumptions(checked, platform)
    head = f"{len(rows)} assumptions on CANN {platform.cann} and {platform.chip} that no public source covers"
    lines = [f"{row.operators:>8}  {row.operator} ({row.what}): {row.assumed}" for row in rows]
    return views.InspectView([asdict(row) for row in rows], (head, *lines))
