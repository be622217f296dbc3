"""The graphs for NPUs that an artifact ships: the two encodings of their files, and what is done with a graph of either."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...graphs.types import Mesh, Signature
from .. import collectives_check
from ..artifact.artifact import Artifact
from ..artifact.manifest import GraphEntry
from ..collectives_check import Collective, Talk
from . import ge_file, inspect_ge, inspect_weights
from .acl_graph import file as acl_file
from .acl_graph import inspect_acl
from .acl_graph.file import AclFile
from .ge_file import GROUPS, GeFile, patched

ShippedGraph = GeFile | AclFile
Counts = Mapping[str, int]
"""Number of operators by type."""


@dataclass(frozen=True)
class Encoding:
    """What is done with the graphs of a backend for NPUs; each function takes one.

    Attributes:
        backend: whose files have it.
        decode: reads a file.
        encode: writes it; equal graphs have equal bytes.
        check: proves that the graph writes the state of a signature in place and folds its parameters once; else `LoweringError`.
        text: an operator a line.
        fields: what else the graph says of itself.
        bodies: operators of each body; "" has those of none.
        launched: those of each body that start a kernel, without what depends on sizes alone: constants, copies of what is strided.
        launch_facts: launches of a step and what the host does for them, where that is no single call.
        collectives: in an order that holds on a device, groups as the partitioned graph names them; else `LoweringError`.
        of_rank: the collectives of a rank of a mesh; else `LoweringError`.
    """

    backend: str
    decode: Callable[[bytes], ShippedGraph]
    encode: Callable[[Any], bytes]
    check: Callable[[Any, Signature], None]
    text: Callable[[Any], str]
    fields: tuple[str, ...]
    bodies: Callable[[Any], Mapping[str, Counts]]
    launched: Callable[[Any], Mapping[str, Counts]]
    launch_facts: Callable[[Any], Mapping[str, Any]]
    collectives: Callable[[Any], tuple[Collective, ...]]
    of_rank: Callable[[Any, int, Mesh], list[Talk]]

    def census(self, graph: ShippedGraph) -> dict[str, int]:
        """Operators of the whole graph."""
        counts = dict[str, int]()
        for body in self.bodies(graph).values():
            for name, count in body.items():
                counts[name] = counts.get(name, 0) + count
        return dict(sorted(counts.items()))


def _check_ge(graph: GeFile, signature: Signature) -> None:
    inspect_ge.check(graph, signature)
    inspect_weights.check_folded(graph, len(signature.params))


def _of_ge_rank(graph: GeFile, rank: int, mesh: Mesh) -> list[Talk]:
    """Read from the graph that is patched as the rank does when it loads it."""
    members = {name: mesh.group(name, rank) for name in GROUPS}
    names = {name: f"{name}:{members[name][0]}" for name in GROUPS}
    return collectives_check.of_rank(patched(graph, rank, names), rank, {names[name]: members[name] for name in GROUPS})


GE = Encoding(
    backend=GeFile.suffix,
    decode=ge_file.decode,
    encode=ge_file.encode,
    check=_check_ge,
    text=lambda graph: inspect_ge.text(graph.graph),
    fields=("options", "engine", "donations", "bound", "inputs", "outputs", "patches"),
    bodies=lambda graph: inspect_ge.census_by_body(graph.graph),
    launched=lambda graph: inspect_ge.launched_by_body(graph.graph),
    launch_facts=lambda graph: {},
    collectives=lambda graph: collectives_check.of_ge_file(graph, in_order=True),
    of_rank=_of_ge_rank,
)
CAPTURED = Encoding(
    backend=AclFile.suffix,
    decode=acl_file.decode,
    encode=acl_file.encode,
    check=inspect_acl.check,
    text=inspect_acl.text,
    fields=("inputs", "outputs", "written", "cuts", "captured", "beside"),
    bodies=inspect_acl.census_by_body,
    launched=inspect_acl.launched_by_kind,
    launch_facts=inspect_acl.launch_facts,
    collectives=collectives_check.of_acl_file,
    # Groups have their symbols on all ranks.
    of_rank=lambda graph, rank, mesh: collectives_check.of_acl_rank(graph, {name: mesh.group(name, rank) for name in GROUPS}),
)
ENCODINGS: Mapping[str, Encoding] = {encoding.backend: encoding for encoding in (GE, CAPTURED)}


def encoding_of(graph: ShippedGraph) -> Encoding:
    """The encoding of a graph."""
    return ENCODINGS[graph.suffix]


def shipped_graph(artifact: Artifact, entry: GraphEntry) -> ShippedGraph | None:
    """The graph of a bucket that an NPU compiles or captures; None where it has none."""
    if entry.compiled is None or entry.compiled.backend not in ENCODINGS:
        return None
    return ENCODINGS[entry.compiled.backend].decode((artifact.path / entry.compiled.file).read_bytes())
