"""Makes the `.aclgraph` file of a lowered graph."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch.fx import GraphModule, Node

from ....graphs.errors import LoweringError
from ....graphs.types import Signature
from ...artifact import graph_io
from ..ge_file import Folded
from ..operators.table import HOST_LISTS
from .file import AclFile
from .flat import BODY, Flat, flat, written_memory
from .host_lists import lists_of, take_lists, with_cuts
from .in_place import write_in_place
from .once import drop_unread, fold_constants, merge_equal
from .products import fuse_products, multiply_with_nz


def acl_file(graph: GraphModule, signature: Signature, *, captured: bool) -> AclFile:
    """The file of a graph that was lowered for this backend.

    Args:
        graph: `Lowered.graph`, calls of bodies.
        captured: whether the graph is captured when it is opened.

    Raises:
        LoweringError: the graph has another form.
    """
    made, cuts = _transformed(flat(graph, signature), captured)
    nodes = list(made.graph.graph.nodes)
    operands = [node for node in nodes if node.op == "placeholder"]
    bodies = (str(node.meta.get(BODY, "")) for node in nodes[len(operands) :] if node.op != "output")
    values, memory = len(operands) - made.inputs, written_memory(made.graph)
    if captured:
        _check_updates(nodes, (len(operands), *cuts, len(nodes)))
    return AclFile(
        graph=graph_io.encode(made.graph),
        inputs=made.inputs,
        outputs=len(signature.outputs),
        written=tuple(i for i, node in enumerate(operands) if node in memory),
        cuts=cuts,
        captured=captured,
        calls=tuple((body, len(list(run))) for body, run in itertools.groupby(bodies)),
        folded=Folded(graph_io.encode(made.folding), made.params, values) if made.folding is not None else None,
    )


def _check_updates(nodes: Sequence[Node], borders: Sequence[int]) -> None:
    """Refuses a segment whose operators take constant lists alone: each update would be given before the launch that waits for it."""
    for start, stop in itertools.pairwise(borders):
        takers = [node for node in nodes[start:stop] if str(node.target) in HOST_LISTS]
        if takers and not any(map(lists_of, takers)):
            raise LoweringError(
                f"{takers[0].name} ({takers[0].target}) and what is captured with it take lists of constants alone, and two updates before"
                " a replay waits for one never end; legal are lists that the graph computes"
            )


def _transformed(flattened: Flat, captured: bool) -> tuple[Flat, tuple[int, ...]]:
    write_in_place(flattened.graph)
    if not captured:
        fuse_products(flattened.graph)
    multiply_with_nz(flattened.graph)
    merge_equal(flattened.graph)
    take_lists(flattened.graph)
    drop_unread(flattened.graph)
    folded = fold_constants(flattened)
    graph, cuts = with_cuts(folded.graph)
    return Flat(graph, folded.inputs, folded.folding, folded.params), cuts
