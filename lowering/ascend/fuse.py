"""Turns a matrix product and the collective beside it into one operator that lets them overlap.

Three forms: a product whose sum is scattered (MatmulReduceScatter), a gather whose result is multiplied (AllGatherMatmul), and a
product that is summed everywhere (MatmulAllReduce). What is legal was read from CANN's operator documents (ops-transformer, mc2) and
from torch_npu's; the constants below have it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .toolchain.harness import Torchair

REDUCE_SCATTER, ALL_GATHER, ALL_REDUCE = "reduce_scatter", "all_gather", "all_reduce"
FORMS: frozenset[str] = frozenset()
"""Forms that builds use: none, because none is documented for inference on all machines that a graph may run on.

`REDUCE_SCATTER` and `ALL_GATHER`: a graph for an A2 or A3 can only ask for communication by AI CPU (torchair refuses `comm_mode`
there), and torch_npu documents that mode of both for training alone. `ALL_REDUCE`: for inference, on an A2; no A3 has it, and
lowering does not know the machine, nor does an all-reduce say how many ranks it has.
"""

MIN_ROWS = 1024
"""Rows of the product from which overlapping pays. Below, starting the kernel costs more than there is to hide: CANN's document of the
all-reduce form says to use it in prefill and not in decode, and vLLM-Ascend fuses beyond 1000 tokens."""
RANKS = (2, 4, 8)
"""Members that both A2 and A3 take. An A3 documents 16 and 32 too; with 16 vLLM-Ascend found that the operator fails (its pull
request 6168)."""
DEPTHS = range(256, 65535)
"""K, the columns of the activations. The all-reduce form takes less as well, where there is even less to hide."""
DTYPES = (torch.bfloat16, torch.float16)
GROUP = "tp"
"""All fused operators of a model must share one communicator on an A2, and its ranks must be linked directly: those of a tp group are."""

_c10d, _aten = torch.ops._c10d_functional, torch.ops.aten


def fuse(body: GraphModule, forms: Collection[str] | None = None) -> int:
    """Fuses in place what is legal and pays; the order of collectives stays.

    Args:
        body: flat, of aten, `npu` and collective operators, every node with a fake `meta["val"]`; torch_npu is loaded.
        forms: which of `REDUCE_SCATTER` and `ALL_GATHER`; None: `FORMS`.

    Returns:
        number of fusions.
    """
    wanted = FORMS if forms is None else forms
    ways: tuple[tuple[str, Any, Callable[[Graph, Node], bool]], ...] = (
        (REDUCE_SCATTER, _c10d.reduce_scatter_tensor.default, _scattered),
        (ALL_GATHER, _c10d.all_gather_into_tensor.default, _gathered),
        (ALL_REDUCE, _c10d.all_reduce.default, _reduced),
    )
    fused = 0
    for form, target, way in ways:
        nodes = [node for node in body.graph.nodes if node.target is target] if form in wanted else []
        fused += sum(way(body.graph, node) for node in nodes)
    if fused:
        body.recompile()
    return fused


def _scattered(graph: Graph, collective: Node) -> bool:
    """npu_linear -> reduce_scatter_tensor -> wait_tensor."""
    args: Any = collective.args
    _, _, ranks, group = args
    rows = args[0].meta["val"].shape[0]
    if ranks not in RANKS or rows % ranks:
        return False
    return _summed(graph, collective, torch.ops.npu.npu_mm_reduce_scatter_base.default, group, ranks)


def _reduced(graph: Graph, collective: Node) -> bool:
    """npu_linear -> all_reduce -> wait_tensor."""
    args: Any = collective.args
    return _summed(graph, collective, torch.ops.npu.npu_mm_all_reduce_base.default, args[2])


def _summed(graph: Graph, collective: Node, target: Any, *where: Any) -> bool:
    args: Any = collective.args
    product, how, *_ = args
    wait = _wait(collective)
    if wait is None or how != "sum" or not _product(product) or list(product.users) != [collective]:
        return False
    x, weight = product.args
    if not _legal(x, weight, product.meta["val"].shape[0], where[0]) or _written_between(product, collective):
        return False
    with graph.inserting_before(collective):
        y = _call(graph, target, x, _call(graph, _aten.t.default, weight), *where, reduce_op="sum")
    wait.replace_all_uses_with(y)
    _erase(graph, wait, collective, product)
    return True


def _gathered(graph: Graph, collective: Node) -> bool:
    """all_gather_into_tensor -> wait_tensor -> the first npu_linear of its readers; the others read what the operator gathered."""
    args: Any = collective.args
    x, ranks, group = args
    wait = _wait(collective)
    if wait is None or ranks not in RANKS:
        return False
    whole = [wait, *(node for node in wait.users if _is_whole(node, wait))]
    products: list[Any] = sorted(user for node in whole for user in node.users if _product(user) and user.args[0] is node)
    if not products:
        return False
    weight = products[0].args[1]
    if not _legal(x, weight, wait.meta["val"].shape[0], group) or not _known_before(weight, collective):
        return False
    with graph.inserting_before(collective):
        turned = _call(graph, _aten.t.default, weight)
        both = _call(graph, torch.ops.npu.npu_all_gather_base_mm.default, x, turned, group, ranks, gather_index=0, gather_output=True)
        y, gathered = (_call(graph, operator.getitem, both, i) for i in range(2))
    products[0].replace_all_uses_with(y)
    _erase(graph, products[0])
    for node in reversed(whole):
        node.replace_all_uses_with(gathered)
        graph.erase_node(node)
    _erase(graph, collective)
    if not gathered.users:
        graph.erase_node(gathered)
    return True


def _wait(collective: Node) -> Node | None:
    users = list(collective.users)
    return users[0] if len(users) == 1 and users[0].target is _c10d.wait_tensor.default else None


def _product(node: Any) -> bool:
    """Whether a node is a product of rows and a weight, without bias."""
    target = torch.ops.npu.npu_linear.default
    return isinstance(node, Node) and node.target is target and len(node.args) == 2 and not node.kwargs


def _legal(x: Node, weight: Node, rows: int, group: str) -> bool:
    """What the documents demand of x [M, K], the weight [N, K] and the group, and `MIN_ROWS` of the product's rows."""
    left, right = x.meta["val"], weight.meta["val"]
    # A transposed x is not taken; a turned weight is, of one that lies straight.
    straight = left.dim() == right.dim() == 2 and left.is_contiguous() and right.is_contiguous()
    dtypes = left.dtype in DTYPES and right.dtype == left.dtype
    return group == GROUP and rows >= MIN_ROWS and straight and dtypes and left.shape[1] in DEPTHS


def _is_whole(node: Node, source: Node) -> bool:
    """Whether a node is a slice that cuts nothing off."""
    return node.target is _aten.slice.Tensor and node.args[0] is source and node.meta["val"].shape == source.meta["val"].shape


def _written_between(first: Node, last: Node) -> bool:
    """Whether something is written in place between two nodes: what the first one read may then be another value for the last."""
    node = first.next
    while node is not last:
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            return True
        node = node.next
    return False


def _known_before(value: Node, anchor: Node) -> bool:
    """Whether a value is there before a node; reshapes of a parameter are moved there."""
    if value < anchor:
        return True
    if value.target is not _aten.view.default or not isinstance(value.args[0], Node) or not _known_before(value.args[0], anchor):
        return False
    anchor.prepend(value)
    return True


def _call(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A call with its abstract value."""
    node = graph.call_function(target, args, kwargs)
    values = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in args]
    first = values[0][0] if isinstance(values[0], tuple) else values[0]
    with first.fake_mode:
        node.meta["val"] = target(*values, **kwargs)
    return node


def _erase(graph: Graph, *nodes: Node) -> None:
    for node in nodes:
        graph.erase_node(node)


def register(ta: Torchair) -> None:
    """Makes torchair convert the fused operators with their weight as it lies, [N, K] and `is_trans_b`, without a Transpose a step."""
    npu = torch.ops.npu

    def scatter(x: Any, x2: Any, group: str, ranks: int, *, reduce_op: str = "sum", meta_outputs: Any = None) -> Any:
        weight, turned = _as_it_lies(ta, x2)
        return ta.ge.MatmulReduceScatter(x, weight, bias=None, group=group, reduce_op=reduce_op, is_trans_b=turned, rank_size=ranks)

    def gather(
        x: Any, x2: Any, group: str, ranks: int, *, gather_index: int = 0, gather_output: bool = True, meta_outputs: Any = None
    ) -> Any:
        weight, turned = _as_it_lies(ta, x2)
        options = {"gather_index": gather_index, "is_gather_out": gather_output}
        return ta.ge.AllGatherMatmul(x, weight, bias=None, group=group, is_trans_b=turned, rank_size=ranks, **options)

    def reduce(x: Any, x2: Any, group: str, *, reduce_op: str = "sum", meta_outputs: Any = None) -> Any:
        weight, turned = _as_it_lies(ta, x2)
        return ta.ge.MatmulAllReduce(x, weight, *[None] * 8, group=group, reduce_op=reduce_op, is_trans_b=turned, comm_mode="ai_cpu")

    for op, converter in (
        (npu.npu_mm_reduce_scatter_base.default, scatter),
        (npu.npu_mm_all_reduce_base.default, reduce),
        (npu.npu_all_gather_base_mm.default, gather),
    ):
        # torchair imports its own converters at the first look-up; they would replace these.
        ta.find_converter(op)
        ta.register_converter(op)(converter)


def _as_it_lies(ta: Torchair, x2: Any) -> tuple[Any, bool]:
    """The weight before the Transpose that `fuse` put in front of its only reader, and whether there is one; the Transpose goes."""
    made = ta.torchair.ge._ge_graph
    ops = made.get_default_ge_graph().op
    if len(ops) < 2 or ops[-1].type != "Transpose" or [x2.tensor, ops[-1].input[1]] != [f"{ops[-1].name}:0", f"{ops[-2].name}:0"]:
        return x2, False
    name, _, port = ops[-1].input[0].rpartition(":")
    weight = made.Tensor(next(op for op in ops if op.name == name), int(port))
    del ops[-2:]
    return weight, True
