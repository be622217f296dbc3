"""lowering/ascend/fold.py: derived values have names that are equal in all buckets, and are computed from a rank's shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import ge_bodies as gb

from npucompile.graphs.errors import LoweringError
from npucompile.graphs.types import Aval, Leaf
from npucompile.lowering.artifact import graph_io
from npucompile.lowering.ascend.fold import FOLDED, evaluate, expressions, sources
from npucompile.lowering.ascend.ge_file import Folded, GeFile
from npucompile.lowering.ascend.hoist import hoist

G, A = ((8,), gb.BF16), ((8, 2), gb.F32)
NAMES = ("params.g", "params.unread", "params.a")
PARAMS = tuple(Leaf(name, Aval(*shape)) for name, shape in zip(NAMES, (G, G, A), strict=True))


def bucket(rows: int) -> GeFile:
    """A graph of that many rows, of which only what it folds is here."""

    def body(x: Any, g: Any, a: Any) -> tuple[Any, ...]:
        return (x * (1 + g) * (a.sum(1) + g) * a.unbind(1)[1],)

    main, shape = gb.Main(), ((rows, 8), gb.F32)
    g, _, a = (main.operand(leaf.name, (leaf.aval.shape, leaf.aval.dtype)) for leaf in PARAMS)
    x = main.operand("inputs.x", shape)
    main.body("body", body, [shape, G, A])
    graph: Any = hoist(*main.done(*main.call("body", x, g, a)))
    folded = Folded(graph_io.encode(graph.get_submodule(FOLDED)), (0, 2), 3)
    return GeFile(b"", {}, (), (), inputs=4, outputs=1, patches=(), feeds=(3, 4, 5, 6), folded=folded)


GE_FILE = bucket(4)
BARE = GeFile(b"", {}, (), (), inputs=4, outputs=1, patches=())


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, generator=generator).to(gb.BF16), torch.randn(8, 2, generator=generator)


def test_values_are_named_by_their_expressions_in_every_bucket() -> None:
    assert expressions(GE_FILE, PARAMS) == (
        "aten.add.Tensor(params.g, 1)",
        "aten.add.Tensor(aten.sum.dim_IntList(params.a, [1]), params.g)",
        "aten.clone(operator.getitem(aten.unbind.int(params.a, 1), 1), memory_format=torch.contiguous_format)",
    )
    assert expressions(bucket(64), PARAMS) == expressions(GE_FILE, PARAMS)
    assert expressions(BARE, PARAMS) == ()


def test_values_are_computed_from_parameters() -> None:
    g, a = tensors()
    values = evaluate(GE_FILE, [g, None, a])
    for value, expected in zip(values, (1 + g, a.sum(1) + g, a[:, 1]), strict=True):
        assert value.dtype == expected.dtype
        assert torch.equal(value, expected)
        assert value.is_contiguous()
    assert evaluate(BARE, [g, None, a]) == []


def test_a_value_alone_needs_its_own_parameters() -> None:
    g, a = tensors()
    assert sources(GE_FILE) == ((0,), (0, 2), (2,))
    assert sources(BARE) == ()
    (first,) = evaluate(GE_FILE, [g], which={0})
    (third,) = evaluate(GE_FILE, [None, None, a], which={2})
    assert torch.equal(first, 1 + g)
    assert torch.equal(third, a[:, 1])


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        (lambda g, a: [None, None, a], r"params.g is missing; derived values are computed from bf16\[8\]"),
        (lambda g, a: [g, None], r"params.a is missing; derived values are computed from f32\[8,2\]"),
        (lambda g, a: [g.float(), None, a], r"params.g is f32\[8\]; derived values are computed from bf16\[8\]"),
    ],
)
def test_other_parameters_are_refused(operands: Any, message: str) -> None:
    with pytest.raises(LoweringError, match=message):
        evaluate(GE_FILE, operands(*tensors()))
