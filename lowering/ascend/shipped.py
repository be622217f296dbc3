"""The graphs for NPUs that an artifact ships, read from their files."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..artifact.artifact import Artifact
from ..artifact.manifest import GraphEntry
from . import ge_file
from .acl_graph import file as acl_file
from .acl_graph.file import AclFile
from .ge_file import GeFile

ShippedGraph = GeFile | AclFile
DECODERS: Mapping[str, Callable[[bytes], ShippedGraph]] = {"ge": ge_file.decode, "aclgraph": acl_file.decode}
"""What reads a graph, by the backend that wrote it."""


def shipped_graph(artifact: Artifact, entry: GraphEntry) -> ShippedGraph | None:
    """The graph of a bucket that an NPU compiles or captures; None where it has none."""
    if entry.compiled is None or entry.compiled.backend not in DECODERS:
        return None
    return DECODERS[entry.compiled.backend]((artifact.path / entry.compiled.file).read_bytes())
