"""The `.aclgraph` file: a flat graph of torch operators for all ranks, and how it is run."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import msgpack
from torch.fx import GraphModule

from ....graphs.errors import LoweringError
from ...artifact.graph_io import NamedOperator
from ...artifact.graph_io import decode as decode_graph
from ..ge_file import Folded
from ..packed import fields_of

FORMAT = "npucompile.aclgraph/2"
SUFFIX = "aclgraph"


@dataclass(frozen=True)
class AclFile:
    """One graph for all ranks. An operator with `TorchForm.host_lists` has integer tensors, computed by the graph, in place of its lists.

    Attributes:
        graph: flat (artifact/graph_io.py): operands of the program, then derived values -> outputs. State operands are written in place.
        inputs: number of operands of the program.
        outputs: number of results.
        written: operands that the graph writes.
        cuts: numbers of the nodes before which the host reads integers that it must know; they divide the graph into segments.
        captured: whether each segment is captured and replayed; else its operators are launched one by one.
        calls: (body, number of its nodes), in the order of the nodes behind the operands; "" where a node is in no body.
        folded: computes the derived values, from parameters or constants; None where there are none.
        beside: (first, stop) of the nodes that run on a second stream, beside the others, increasing; see second_stream.py.
        ordered: operators run as they are listed.
        options, engine: it has none, which are for GE.
    """

    suffix: ClassVar[str] = SUFFIX
    ordered: ClassVar[bool] = True
    options: ClassVar[Mapping[str, str]] = MappingProxyType({})
    engine: ClassVar[Mapping[str, str]] = options
    graph: bytes
    inputs: int
    outputs: int
    written: tuple[int, ...]
    cuts: tuple[int, ...]
    captured: bool
    calls: tuple[tuple[str, int], ...]
    folded: Folded | None = None
    beside: tuple[tuple[int, int], ...] = ()

    @property
    def operands(self) -> int:
        """Number of operands of the graph: those of the program, then the derived values."""
        return self.inputs + (self.folded.values if self.folded else 0)

    @property
    def overlaps(self) -> bool:
        """Whether operators run on several streams."""
        return bool(self.beside)

    @property
    def bodies(self) -> Iterator[str]:
        """The body of each node behind the operands."""
        return itertools.chain.from_iterable([body] * nodes for body, nodes in self.calls)


def encode(acl_file: AclFile) -> bytes:
    """Bytes of a file; equal files have equal bytes.

    Raises:
        LoweringError: it contradicts itself.
    """
    _check(acl_file)
    fields: dict[str, Any] = {
        "format": FORMAT,
        "graph": acl_file.graph,
        "inputs": acl_file.inputs,
        "outputs": acl_file.outputs,
        "written": acl_file.written,
        "cuts": acl_file.cuts,
        "captured": acl_file.captured,
        "calls": acl_file.calls,
        "folded": acl_file.folded and [acl_file.folded.graph, acl_file.folded.params, acl_file.folded.values],
        "beside": acl_file.beside,
    }
    return bytes(msgpack.packb(fields))


def decode(data: bytes) -> AclFile:
    """Reads what `encode` wrote.

    Raises:
        LoweringError: the bytes are something else, or of another format.
    """
    fields = fields_of(data, FORMAT)
    try:
        folded = fields["folded"]
        acl_file = AclFile(
            graph=fields["graph"],
            inputs=fields["inputs"],
            outputs=fields["outputs"],
            written=tuple(fields["written"]),
            cuts=tuple(fields["cuts"]),
            captured=fields["captured"],
            calls=tuple((body, nodes) for body, nodes in fields["calls"]),
            folded=None if folded is None else Folded(folded[0], tuple(folded[1]), folded[2]),
            beside=tuple((first, stop) for first, stop in fields["beside"]),
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise LoweringError(f"this is not a file of format {FORMAT!r}: {error!r}") from None
    _check(acl_file)
    return acl_file


@functools.lru_cache(maxsize=2)
def graph_of(acl_file: AclFile) -> GraphModule:
    """The graph, with a `NamedOperator` as the target of each operator; not to be changed.

    Raises:
        LoweringError: the bytes are no graph.
    """
    return decode_graph(acl_file.graph, NamedOperator)


def _check(acl_file: AclFile) -> None:
    if wrong := [operand for operand in acl_file.written if not 0 <= operand < acl_file.inputs]:
        raise LoweringError(f"a file of {acl_file.inputs} operands writes operands {wrong}; legal are 0 to {acl_file.inputs - 1}")
    first, last = acl_file.operands, acl_file.operands + sum(nodes for _, nodes in acl_file.calls)
    if list(acl_file.cuts) != sorted(set(acl_file.cuts)) or not all(first <= cut <= last for cut in acl_file.cuts):
        raise LoweringError(f"a file of nodes {first} to {last} is cut before {acl_file.cuts}; legal are increasing numbers of these")
    borders = [border for span in acl_file.beside for border in span]
    if borders != sorted(borders) or not all(first <= border <= last for border in borders):
        raise LoweringError(f"of nodes {first} to {last} {acl_file.beside} are beside the others; legal are increasing numbers of these")
    if acl_file.folded and (wrong := [operand for operand in acl_file.folded.params if not 0 <= operand < acl_file.inputs]):
        raise LoweringError(f"a file of {acl_file.inputs} operands folds operands {wrong}; legal are 0 to {acl_file.inputs - 1}")
