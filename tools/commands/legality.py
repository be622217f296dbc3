"""The views of `npucompile inspect` on what CANN takes: what is illegal in a bucket, and what is assumed without a source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ...graphs.errors import SpecError
from ...lowering.artifact.artifact import Artifact, GraphEntry
from ...lowering.ascend.legality.assumptions import assumptions
from ...lowering.ascend.legality.check import examine
from ...lowering.platform import Platform
from . import views


def illegal(artifact: Artifact, entry: GraphEntry) -> dict[str, Any]:
    """`illegal`: what CANN would refuse of a bucket, each kind once with the number of its operators; nothing where it has no GE graph."""
    ge_file = views.ge_file_of(artifact, entry)
    if ge_file is None:
        return {}
    found = examine(ge_file, Platform.of(artifact.manifest.platform)).pairs()
    return {"illegal": [asdict(violation) | {"operators": operators} for violation, operators in found]}


def assumed(artifact: Artifact, entries: Sequence[GraphEntry]) -> views.View:
    """Rows of the legality table without a source for the artifact's release of CANN, and how many operators rely on each.

    Raises:
        SpecError: no bucket has a GE graph.
    """
    ge_files = [ge_file for entry in entries if (ge_file := views.ge_file_of(artifact, entry)) is not None]
    if not ge_files:
        raise SpecError(f"{artifact.path} has no graphs for NPUs, of which --assumptions tells; legal is a build with --target ascend-a3")
    platform = Platform.of(artifact.manifest.platform)
    rows = assumptions(ge_files, platform)
    head = f"{len(rows)} assumptions on CANN {platform.cann} and {platform.chip} that no public source covers"
    lines = [f"{row.operators:>8}  {row.operator} ({row.what}): {row.assumed}" for row in rows]
    return views.View([asdict(row) for row in rows], (head, *lines))
