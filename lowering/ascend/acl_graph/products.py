"""Products with weights in NZ, in the form that a captured graph may have."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from .flat import BODY

_LINEAR = "npu.npu_linear.default"


def multiply_with_nz(graph: GraphModule) -> None:
    """Replaces `npu_linear` by `mm` with the weight transposed, which is a view.

    torch_npu runs `npu_linear` with a weight in NZ as an aclop operator, since op_plugin_functions.yaml of Ascend/op-plugin@517f2e7 gives
    it no `internal_format_opapi`, and refuses such operators while it captures (Ascend/pytorch@9e73e708a
    torch_npu/csrc/core/npu/NPUGraphsUtils.h). Its `mm` calls aclnnMatmulWeightNz, also for the transposed view of a weight.
    """
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and str(node.target) == _LINEAR and len(node.args) == 2 and not node.kwargs:
            _replace(graph, node)
    graph.graph.lint()
    graph.recompile()


def _replace(graph: GraphModule, node: Node) -> None:
    x, weight = node.args
    assert isinstance(weight, Node)
    with graph.graph.inserting_before(node):
        transposed = graph.graph.call_function(torch.ops.aten.t.default, (weight,))
        product = graph.graph.call_function(torch.ops.aten.mm.default, (x, transposed))
    transposed.meta = {"val": weight.meta["val"].t()} | ({BODY: node.meta[BODY]} if BODY in node.meta else {})
    product.meta = dict(node.meta)
    node.replace_all_uses_with(product)
    graph.graph.erase_node(node)
