"""operators/type_rules.py: shapes broadcast as torch's do. test_ge_types.py compares every rule with what tracing declares."""

from __future__ import annotations

import pytest
import torch

from npucompile.lowering.ascend.operators.type_rules import UnknownTypeError, broadcast


@pytest.mark.parametrize("shapes", [[(3, 1), (4,)], [(), (2, 3)], [(1, 1, 5), (7, 1)], [(2, 1), (1, 3), (4, 1, 1)], [(0,), (1,)]])
def test_shapes_broadcast_as_in_torch(shapes):
    assert broadcast(shapes) == tuple(torch.broadcast_shapes(*shapes))


def test_shapes_that_do_not_broadcast_are_both_named():
    with pytest.raises(UnknownTypeError, match=r"\(2, 3\), \(4,\) do not broadcast"):
        broadcast([(2, 3), (4,)])
