"""lowering/ascend/acl_graph/once.py: what is equal, what is constant, and what only looks so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import acl_graphs as ag

from npucompile.graphs.types import Mesh
from npucompile.lowering.ascend.emulator.interpreter import Interpreter

X = ((3,), ag.F32)


def filled_in_place(x: Any) -> tuple[Any, ...]:
    """Two equal constants, each of which is written, and two that are not."""
    first, second = (torch.zeros(3, dtype=ag.F32, device="meta") for _ in range(2))
    first.add_(x)
    plain = torch.zeros(3, dtype=ag.F32, device="meta") + torch.zeros(3, dtype=ag.F32, device="meta") + x
    return (first + second.add_(1) + plain,)


def test_memory_that_is_written_is_neither_shared_nor_constant() -> None:
    made, _ = ag.of_body(filled_in_place, inputs_x=X)
    names = ag.names(made)
    assert names.count("aten.zeros.default") == 2
    assert made.folded is not None
    assert made.folded.values == 1
    x = torch.tensor([1.0, 2.0, 3.0])
    assert Interpreter(made, Mesh())([[x]])[0][0].tolist() == [3.0, 5.0, 7.0]


def quantised_twice(x: Any) -> tuple[Any, ...]:
    """Projections of one activation quantise it each."""
    (a, scale), (b, _) = torch.ops.npu.npu_dynamic_quant(x), torch.ops.npu.npu_dynamic_quant(x)
    return (a.float() + b.float() + scale[:, None],)


@pytest.mark.parametrize(
    ("body", "dtype", "name", "launches"),
    [
        (lambda x: (torch.add(x, 1), torch.add(x, 1.0), torch.add(x, 1)), ag.I32, "aten.add.Tensor", 2),
        (quantised_twice, ag.BF16, "npu.npu_dynamic_quant.default", 1),
    ],
    ids=["equal numbers of other types", "an activation"],
)
def test_equal_values_are_computed_once(body: Any, dtype: torch.dtype, name: str, launches: int) -> None:
    made, _ = ag.of_body(body, inputs_x=((3, 16), dtype))
    assert ag.names(made).count(name) == launches


def test_collectives_are_never_merged_or_dropped() -> None:
    def body(x: Any) -> tuple[Any, ...]:
        reduce = torch.ops._c10d_functional.all_reduce
        reduce(x, "sum", "tp")
        return (reduce(x, "sum", "tp") + reduce(x, "sum", "tp") + torch.exp(x).mul(0).shape[0],)

    made, _ = ag.of_body(body, inputs_x=X)
    names = ag.names(made)
    assert names.count("_c10d_functional.all_reduce.default") == 3
    assert not {"aten.exp.default", "aten.mul.Tensor"} & set(names)
