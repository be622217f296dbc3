"""lowering/ascend/acl_graph/host_lists.py: lengths are computed early, read together, and the graph is cut behind them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import acl_graphs as ag

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.acl_graph.file import AclFile, graph_of
from npucompile.lowering.ascend.acl_graph.host_lists import lists_of
from npucompile.lowering.ascend.acl_graph.inspect_acl import check


def uses(made: AclFile) -> list[tuple[int, int]]:
    """(number of an operator, number of the value that it takes as a list)."""
    nodes = list(graph_of(made).graph.nodes)
    return [(i, nodes.index(value)) for i, node in enumerate(nodes) for value in lists_of(node).values()]


def three_steps(pool: Any, x: Any, pages: Any, starts: Any) -> tuple[Any, ...]:
    """Lengths of the first are known at once; those of the others depend on what the first computes."""
    first = ag.attend(x.exp(), pool, pages, (starts + 1).long())
    counts = (first.sum(-1) > 0).int()
    second = ag.attend(first, pool, pages, (starts + counts).long())
    third = ag.attend(second, pool, pages, (starts + counts + 1).long())
    return (third,)


def test_lists_that_are_known_together_share_a_cut() -> None:
    made, signature = ag.of_body(three_steps, **ag.ATTENTION)
    (first, early), (second, late), (third, last) = uses(made)
    assert len(made.cuts) == 2
    assert early < made.cuts[0] <= first < late < made.cuts[1] <= second < third
    assert late < last < made.cuts[1]
    check(made, signature)


def test_lists_of_operands_and_of_constants_cost_no_more_than_they_must() -> None:
    made, _ = ag.of_body(
        lambda pool, x, pages, lengths: (ag.attend(x, pool, pages, lengths),), **{**ag.ATTENTION, "inputs_starts": ((2,), ag.I64)}
    )
    assert made.cuts == (made.operands,)
    made, signature = ag.of_body(
        lambda pool, x, pages, starts: (ag.attend(x, pool, pages, torch.full((2,), 3, dtype=ag.I64, device="meta")) + starts[:, None],),
        captured=False,
        **ag.ATTENTION,
    )
    (node,) = [node for node in graph_of(made).graph.nodes if "attention" in str(node.target)]
    assert (made.cuts, node.kwargs["actual_seq_lengths_kv"]) == ((), [3, 3])
    with pytest.raises(LoweringError, match=r"has actual_seq_lengths_kv \[3, 3\] in every step; legal are lengths of the step"):
        check(made, signature)


def test_a_length_that_is_read_from_a_pool_is_read_before_the_pool_is_written() -> None:
    def body(pool: Any, starts: Any, x: Any, pages: Any) -> tuple[Any, ...]:
        old = starts.index_select(0, pages[:, 0])
        starts.add_(1)
        return (ag.attend(x.exp(), pool, pages, (old + 1).long()), starts.index_select(0, pages[:, 0]))

    made, _ = ag.of_body(body, state_pool=ag.POOL, state_starts=((4,), ag.I32), inputs_x=ag.ROWS, inputs_pages=ag.PAGES)
    names = ["", *[""] * (made.operands - 1), *ag.names(made)]
    reads = [i for i, name in enumerate(names) if name == "aten.index_select.default"]
    assert reads[0] < names.index("aten.add_.Tensor") < reads[1]


def test_an_operator_of_ge_alone_is_refused() -> None:
    library = torch.library.Library("air", "FRAGMENT")
    library.define("npuc_test_only_in_ge(Tensor x) -> Tensor")
    library.impl("npuc_test_only_in_ge", lambda x: x.clone(), "Meta")
    with pytest.raises(LoweringError, match=r"air.npuc_test_only_in_ge.default, which GE alone has"):
        ag.of_body(lambda x: (torch.ops.air.npuc_test_only_in_ge(x),), inputs_x=ag.ROWS)
