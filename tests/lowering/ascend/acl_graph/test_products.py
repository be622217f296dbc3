"""lowering/ascend/acl_graph/products.py: products of a captured graph take their weights in NZ, and compute what they did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import acl_graphs as ag
from support import ge_bodies as gb

from npucompile.graphs.types import Mesh
from npucompile.lowering.ascend.acl_graph.formats import weight_operands
from npucompile.lowering.ascend.emulator.interpreter import Interpreter
from npucompile.lowering.ascend.operators.dense import npu_linear


@pytest.fixture(autouse=True)
def operators(tmp_path_factory: pytest.TempPathFactory) -> None:
    gb.loaded(tmp_path_factory.mktemp("stubs"))


def body(x: Any, weight: Any, bias: Any) -> tuple[Any, ...]:
    return torch.ops.npu.npu_linear(x, weight), torch.ops.npu.npu_linear(x, weight, bias)


def test_products_without_bias_are_mm_of_a_transposed_view(tmp_path: Path) -> None:
    made, _ = ag.of_body(body, inputs_x=((4, 16), ag.BF16), inputs_weight=((32, 16), ag.BF16), inputs_bias=((32,), ag.BF16))
    assert ag.names(made) == ["aten.t.default", "aten.mm.default", "npu.npu_linear.default"]
    assert weight_operands(made) == (), "a product with a bias reads it as well, in ND"
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(*shape).to(ag.BF16) for shape in ((4, 16), (32, 16), (32,)))
    product, biased = Interpreter(made, Mesh.parse("tp=1"))([[x, weight, bias]])[0]
    assert torch.equal(product, npu_linear(x, weight))
    assert torch.equal(biased, npu_linear(x, weight, bias))
