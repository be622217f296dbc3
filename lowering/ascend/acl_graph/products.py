"""Products in the form that a graph may have: captured with weights in NZ, launched as one operator with the sum of their parts."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from .flat import BODY

RANKS = (2, 4, 8)
"""Sizes of groups that the operator takes on both chips (documentation of Ascend/op-plugin at 09f6ca6f). It lists 16 and 32 for Atlas A3,
where 16 failed (vllm-project/vllm-ascend pull request 6168)."""

_LONGEST = 65534
"""Most input channels that the operator takes, by the same documentation; at least 256, which every model has that is served."""


def fuse_products(graph: GraphModule) -> None:
    """Replaces `npu_linear`, whose result a sum over a group alone reads, and that sum by `npu_mm_reduce_scatter_base`.

    Its vector cores communicate (`comm_mode="aiv"`): the other mode is for training. vllm-ascend ran it so in prefill with CANN 8.3 and
    later (its pull requests 3693 and 12689). It is for graphs whose operators are launched: reports call it slower for few rows (3834), and
    a fused collective unable to allocate what it needs while a decode step is captured (16705).
    """
    for node in list(graph.graph.nodes):
        if node.target is torch.ops._c10d_functional.reduce_scatter_tensor.default and _fits(node):
            _fuse(graph, node)
    graph.graph.lint()
    graph.recompile()


def _fits(reduced: Node) -> bool:
    product, how, ranks, _ = reduced.args
    if not isinstance(product, Node) or product.target is not torch.ops.npu.npu_linear.default or len(product.users) > 1:
        return False
    if how != "sum" or ranks not in RANKS or len(product.args) != 2 or product.kwargs:
        return False
    x = product.all_input_nodes[0].meta["val"]
    waits = all(user.target is torch.ops._c10d_functional.wait_tensor.default for user in reduced.users)
    return bool(waits and x.dim() == 2 and x.is_contiguous() and x.shape[1] <= _LONGEST)


def _fuse(graph: GraphModule, reduced: Node) -> None:
    product, how, ranks, group = reduced.args
    assert isinstance(product, Node)
    x, weight = product.all_input_nodes
    with graph.graph.inserting_before(reduced):
        columns = _transposed(graph, weight, reduced)
        fused = graph.graph.call_function(
            torch.ops.npu.npu_mm_reduce_scatter_base.default, (x, columns, group, ranks), {"reduce_op": how, "comm_mode": "aiv"}
        )
    fused.meta = dict(reduced.meta)
    for wait in list(reduced.users):
        # The operator is on the stream of its readers.
        wait.replace_all_uses_with(fused)
        graph.graph.erase_node(wait)
    for replaced in (reduced, product):
        graph.graph.erase_node(replaced)


def multiply_with_nz(graph: GraphModule) -> None:
    """Replaces `npu_linear` by `mm` with the weight transposed, which is a view.

    torch_npu runs `npu_linear` with a weight in NZ as an aclop operator, since op_plugin_functions.yaml of Ascend/op-plugin@517f2e7 gives
    it no `internal_format_opapi`, and refuses such operators while it captures (Ascend/pytorch@9e73e708a
    torch_npu/csrc/core/npu/NPUGraphsUtils.h). Its `mm` calls aclnnMatmulWeightNz, also for the transposed view of a weight.
    """
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and node.target is torch.ops.npu.npu_linear.default and len(node.args) == 2 and not node.kwargs:
            _multiply(graph, node)
    graph.graph.lint()
    graph.recompile()


def _multiply(graph: GraphModule, node: Node) -> None:
    x, weight = node.args
    assert isinstance(weight, Node)
    with graph.graph.inserting_before(node):
        product = graph.graph.call_function(torch.ops.aten.mm.default, (x, _transposed(graph, weight, node)))
    product.meta = dict(node.meta)
    node.replace_all_uses_with(product)
    graph.graph.erase_node(node)


def _transposed(graph: GraphModule, weight: Node, product: Node) -> Node:
    """A view of a weight, in the body of the product that takes it."""
    view = graph.graph.call_function(torch.ops.aten.t.default, (weight,))
    view.meta = {"val": weight.meta["val"].t(), BODY: product.meta.get(BODY, "")}
    return view
