"""The tiny artifact told to be one for NPUs whose decode-b4 bucket has a given GE graph."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from npucompile.lowering.artifact.artifact import Artifact, GraphEntry
from npucompile.lowering.artifact.manifest import ExecutableRecord
from npucompile.lowering.ascend.ge_file import GeFile, encode
from npucompile.lowering.ascend.shipped import GE

from . import tiny

BUCKET = "decode-b4-q4"


def published(path: Path, ge_file: GeFile, **fields: Any) -> Artifact:
    """The artifact in `path`, changed; `fields` are those of its manifest."""

    def change(manifest: Any, writer: Any) -> Any:
        compiled = ExecutableRecord("ge", writer.add("graphs", encode(ge_file), "ge"), "key")
        own = {"compiled": compiled, "census": GE.census(ge_file), "eager": None}
        graphs = tuple(replace(entry, **own) if entry.bucket.name == BUCKET else entry for entry in manifest.graphs)
        return replace(manifest, **{"graphs": graphs, "mesh": "dp=2,tp=2", "target": "ascend-a3", "deployment": "row-1"} | fields)

    return tiny.published(path, change)


def entry(artifact: Artifact) -> GraphEntry:
    return next(graph for graph in artifact.manifest.graphs if graph.bucket.name == BUCKET)
