"""lowering/ascend/acl_graph/products.py: products in NZ, or fused with the sum of their parts, compute what they did."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import acl_graphs as ag
from support import ge_bodies as gb

from npucompile.graphs.types import Mesh
from npucompile.lowering.ascend.acl_graph.formats import weight_operands
from npucompile.lowering.ascend.acl_graph.inspect_acl import collectives, launches_by_body
from npucompile.lowering.ascend.emulator.interpreter import Interpreter
from npucompile.lowering.ascend.operators.dense import npu_linear
from npucompile.lowering.collectives_check import of_acl_file

FUSED = "npu.npu_mm_reduce_scatter_base.default"


def reduced(product: Any, ranks: int = 2, how: str = "sum") -> Any:
    return gb.c10.wait_tensor(gb.c10.reduce_scatter_tensor(product, how, ranks, "tp"))


def made(body: Any, dtype: torch.dtype = ag.BF16, *, captured: bool = False) -> Any:
    return ag.of_body(body, captured=captured, params_w=((6, 8), dtype), inputs_x=((4, 8), dtype))[0]


@pytest.mark.parametrize("dtype", [ag.BF16, ag.F32], ids=str)
def test_two_ranks_get_the_sums_that_the_two_operators_gave(dtype: torch.dtype) -> None:
    file = made(lambda w, x: (reduced(torch.ops.npu.npu_linear(x, w)) * 2,), dtype)
    assert launches_by_body(file) == {"body": [FUSED, "aten.mul.Tensor"]}
    operands = [[torch.randn(6, 8).to(dtype), torch.randn(4, 8).to(dtype)] for _ in range(2)]
    total = torch.stack([torch.nn.functional.linear(x, w) for w, x in operands]).float().sum(0).to(dtype) * 2
    for (result,), part in zip(Interpreter(file, Mesh.parse("tp=2"))(operands), total.chunk(2), strict=True):
        torch.testing.assert_close(result, part)


def test_the_list_of_collectives_stays_what_it_was() -> None:
    file = made(lambda w, x: (reduced(torch.ops.npu.npu_linear(x, w)),))
    ((name, group, value),) = collectives(file)
    assert (name, group, tuple(value.shape)) == (FUSED, "tp", (2, 6))
    apart = made(lambda w, x: (reduced(torch.ops.npu.npu_linear(x, w) * 1.5),))
    assert of_acl_file(file) == of_acl_file(apart)


@pytest.mark.parametrize(
    "body",
    [
        lambda w, x: (reduced(product := torch.ops.npu.npu_linear(x, w)), product),
        lambda w, x: (reduced(torch.ops.npu.npu_linear(x, w), how="max"),),
        lambda w, x: (reduced(torch.ops.npu.npu_linear(x.repeat(4, 1), w), 16),),
        lambda w, x: (reduced(torch.ops.npu.npu_linear(x, w, w[:, 0])),),
        lambda w, x: (reduced(torch.ops.npu.npu_linear(x.t()[:6], w[:, :4])),),
        lambda w, x: (reduced(torch.ops.npu.npu_linear(x.view(4, 2, 4), w[:, :4])),),
    ],
    ids=["read twice", "maximum", "sixteen ranks", "bias", "transposed", "three dimensions"],
)
def test_what_the_operator_does_not_take_stays_two(body: Any) -> None:
    names = ag.names(made(body))
    assert FUSED not in names
    products = names.count("aten.mm.default") + names.count("npu.npu_linear.default")
    assert products == names.count("_c10d_functional.reduce_scatter_tensor.default") == 1


def test_captured_graphs_keep_both_operators() -> None:
    assert FUSED not in ag.names(made(lambda w, x: (reduced(torch.ops.npu.npu_linear(x, w)),), captured=True))


def linears(x: Any, weight: Any, bias: Any) -> tuple[Any, ...]:
    return torch.ops.npu.npu_linear(x, weight), torch.ops.npu.npu_linear(x, weight, bias)


def test_products_without_bias_are_mm_of_a_transposed_view() -> None:
    file, _ = ag.of_body(linears, inputs_x=((4, 16), ag.BF16), inputs_weight=((32, 16), ag.BF16), inputs_bias=((32,), ag.BF16))
    assert ag.names(file) == ["aten.t.default", "aten.mm.default", "npu.npu_linear.default"]
    assert weight_operands(file) == (), "a product with a bias reads it as well, in ND"
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*shape).to(ag.BF16) for shape in ((4, 16), (32, 16), (32,)))
    product, biased = Interpreter(file, Mesh.parse("tp=1"))([[x, weight, bias]])[0]
    assert torch.equal(product, npu_linear(x, weight))
    assert torch.equal(biased, npu_linear(x, weight, bias))
