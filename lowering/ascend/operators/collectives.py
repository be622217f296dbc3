"""Collectives over the ranks of a group, and the product that is fused with one.

Kernels take the calls of all members of a group and compute the results of the members that are named, or of all, as torch's functional
collectives do.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ....graphs.errors import LoweringError
from ..ge_file import LEGAL_GROUPS, is_symbol
from . import type_rules, work
from .call import Call, Results
from .checks import FLOATS, refuse_options, require, require_shape
from .node import Node
from .record import Arguments, Converter, GroupKernel, NpuOperator, TorchForm
from .trials import Trial

Members = list[Arguments]
REDUCTIONS = {"sum": "sum", "max": "max", "min": "min", "product": "prod"}
"""GE's name of a reduction by torch's."""
_AFTER = "_npucompile_after"
"""Attribute of a tensor: the control edge that the operator which communicates it gets."""
_TORCH_REDUCTIONS = {ge: name for name, ge in REDUCTIONS.items()}


def _reduced(op: str, tensors: list[torch.Tensor], how: str) -> torch.Tensor:
    stacked = torch.stack(tensors)
    if how == "sum":
        return (stacked.float() if stacked.dtype in FLOATS else stacked).sum(0).to(stacked.dtype)
    if how == "max":
        return stacked.amax(0)
    if how == "min":
        return stacked.amin(0)
    raise LoweringError(f"{op}: reduction {how!r}; legal is 'sum', 'max' or 'min'")


def wanted_members(calls: list[Arguments], members: Sequence[int] | None) -> Sequence[int]:
    """Members whose results are computed: those named, or all."""
    return range(len(calls)) if members is None else members


def check_size(op: str, size: int, calls: list[Arguments]) -> None:
    """Refuses a number of members that is not that of the group.

    Raises:
        LoweringError: naming both.
    """
    if size != len(calls):
        raise LoweringError(f"{op}: the node says {size} members, the group of this mesh has {len(calls)}")


def all_reduce(calls: list[Arguments], members: Sequence[int] | None = None) -> list[torch.Tensor]:
    """(x, how, group) -> the elementwise reduction, float sums in float32, for each member."""
    total = _reduced("all_reduce", [args[0] for args, _ in calls], calls[0][0][1])
    return [total.clone() for _ in wanted_members(calls, members)]


def all_gather_into_tensor(calls: list[Arguments], members: Sequence[int] | None = None) -> list[torch.Tensor]:
    """(x [n, ...], size, group) -> [size * n, ...], members in order, for each member."""
    check_size("all_gather_into_tensor", calls[0][0][1], calls)
    whole = torch.cat([args[0] for args, _ in calls])
    return [whole.clone() for _ in wanted_members(calls, members)]


def reduce_scatter_tensor(calls: list[Arguments], members: Sequence[int] | None = None) -> list[torch.Tensor]:
    """(x [size * n, ...], how, size, group) -> [n, ...], the member's part of the reduction."""
    op = "reduce_scatter_tensor"
    check_size(op, calls[0][0][2], calls)
    total = _reduced(op, [args[0] for args, _ in calls], calls[0][0][1])
    if total.shape[0] % len(calls):
        raise LoweringError(f"{op}: the first size of {tuple(total.shape)} does not divide by the {len(calls)} members")
    parts = total.chunk(len(calls))
    return [parts[rank].clone() for rank in wanted_members(calls, members)]


def all_to_all_single(calls: list[Arguments], members: Sequence[int] | None = None) -> list[torch.Tensor]:
    """(x, rows from each member, rows to each member, group) -> member i gets part i of every member, in order."""
    op = "all_to_all_single"
    for i, (args, _) in enumerate(calls):
        sizes = [len(args[1]), len(args[2]), len(calls)]
        if len(set(sizes)) != 1 or sum(args[2]) != args[0].shape[0]:
            raise LoweringError(f"{op}: member {i} of {len(calls)} sends {args[2]} and takes {args[1]} of {tuple(args[0].shape)}")
    parts = [args[0].split(list(args[2])) for args, _ in calls]
    for i, (args, _) in enumerate(calls):
        if (sent := [len(part[i]) for part in parts]) != list(args[1]):
            raise LoweringError(f"{op}: member {i} takes {list(args[1])} rows, the members send it {sent}")
    return [torch.cat([part[i] for part in parts]) for i in wanted_members(calls, members)]


def broadcast(calls: list[Arguments], members: Sequence[int] | None = None) -> list[torch.Tensor]:
    """(x, source, group) -> the source member's x for each member."""
    source = calls[0][0][1]
    if not 0 <= source < len(calls):
        raise LoweringError(f"broadcast: source {source}; legal is 0 to {len(calls) - 1}")
    return [calls[source][0][0].clone() for _ in wanted_members(calls, members)]


def npu_mm_reduce_scatter_base(calls: list[Arguments], members: Sequence[int] | None = None) -> list[torch.Tensor]:
    """(x [size * n, K], weights [K, N], group, size) -> [n, N], the member's part of the sum of products, each rounded to its dtype.

    Source: docs/zh/custom_APIs/torch_npu/torch_npu-npu_mm_reduce_scatter_base.md of Ascend/op-plugin.
    """
    op, products = "npu_mm_reduce_scatter_base", list[Arguments]()
    for (x, weight, group, size), options in calls:
        refuse_options(op, options, reduce_op="sum", comm_mode="aiv")
        if options.get("comm_mode") != "aiv":
            raise LoweringError(f"{op}: comm_mode is {options.get('comm_mode')!r}; legal for inference is 'aiv'")
        rows, columns = require(op, "input", x, FLOATS, (2,)).shape
        require_shape(op, "x2", require(op, "x2", weight, (x.dtype,), (2,)), (columns, weight.shape[1]))
        if not x.is_contiguous() or columns > 65534 or size not in (2, 4, 8):
            raise LoweringError(
                f"{op}: input {(rows, columns)} has strides {x.stride()}, and the group {size} members; legal are rows one behind the "
                "other, fewer than 65535 columns, and 2, 4 or 8 members"
            )
        products.append((((x.float() @ weight.float()).to(x.dtype), "sum", size, group), {}))
    return reduce_scatter_tensor(products, members)


def _reduction(call: Call) -> str:
    how = call.attr("reduction")
    if how not in _TORCH_REDUCTIONS:
        raise LoweringError(f"{call.op}: attribute reduction is {how!r}; legal are {sorted(_TORCH_REDUCTIONS)}")
    return _TORCH_REDUCTIONS[how]


def _all_reduce(calls: list[Call], wanted: Sequence[int] | None = None) -> list[Results]:
    return [*all_reduce([((call.tensor("x"), _reduction(call), ""), {}) for call in _unfused(calls)], wanted)]


def _all_gather(calls: list[Call], wanted: Sequence[int] | None = None) -> list[Results]:
    return [*all_gather_into_tensor([((call.tensor("x"), call.attr("rank_size"), ""), {}) for call in _unfused(calls)], wanted)]


def _reduce_scatter(calls: list[Call], wanted: Sequence[int] | None = None) -> list[Results]:
    members: Members = [((call.tensor("x"), _reduction(call), call.attr("rank_size"), ""), {}) for call in _unfused(calls)]
    return [*reduce_scatter_tensor(members, wanted)]


def _unfused(calls: list[Call]) -> list[Call]:
    """Ignores the fusion attributes, which merge the transfers of several operators without changing a result."""
    for call in calls:
        call.ignore("fusion", "fusion_id")
    return calls


def _all_to_all(calls: list[Call], wanted: Sequence[int] | None = None) -> list[Results]:
    rows, members = calls[0].tensor("x").shape[0], len(calls)
    if rows % members:
        raise LoweringError(f"{calls[0].op}: {rows} rows for {members} members; legal are equal parts")
    parts = [rows // members] * members
    return [*all_to_all_single([((call.tensor("x"), parts, parts, ""), {}) for call in calls], wanted)]


def _all_to_all_v(calls: list[Call], wanted: Sequence[int] | None = None) -> list[Results]:
    """Counts and displacements are in elements; the parts lie side by side, as whole rows."""
    members: Members = []
    for call in calls:
        x = call.tensor("send_data")
        row = max(1, math.prod(x.shape[1:]))
        sent, received = (_rows(call, side, row) for side in ("send", "recv"))
        members.append(((x, received, sent, ""), {}))
    return [*all_to_all_single(members, wanted)]


def _rows(call: Call, side: str, row: int) -> list[int]:
    counts, offsets = call.integers(f"{side}_counts"), call.integers(f"{side}_displacements")
    if offsets != [0, *itertools.accumulate(counts)][:-1] or any(count % row for count in counts):
        raise LoweringError(f"{call.op}: {side} counts {counts} at {offsets} of rows of {row}; legal are whole rows side by side")
    return [count // row for count in counts]


def _broadcast(calls: list[Call], wanted: Sequence[int] | None = None) -> list[Results]:
    return [*broadcast([((call.tensor("x0"), call.attr("root_rank"), ""), {}) for call in _unfused(calls)], wanted)]


# 1 would allow GE to merge neighbouring reductions of a group; torchair does not ask for it either.
_UNFUSED = 0
_DT_INT64 = 9


def _over_groups(emit: Callable[..., Any]) -> Converter:
    """Converts a collective over a symbolic group, without a process group; others keep torchair's own converter.

    The `group` attribute holds the symbolic name until a rank loads the graph and puts its communicator's name there.
    """

    def converter(ta: Any, earlier: Any) -> Any:
        def convert(x: Any, *args: Any, meta_outputs: Any = None) -> Any:
            *rest, group = args
            if is_symbol(group):
                return behind(x, emit(ta.ge, x, *rest, group=group))
            if earlier is None:
                raise LoweringError(f"a collective is over group {group!r}; legal are {LEGAL_GROUPS}")
            return earlier(x, *args)

        return convert

    return converter


def remember(x: Any, first: Any) -> Any:
    """The tensor, for what communicates it to come after another one: GE orders operators by data alone."""
    ordered = copy.copy(x)
    setattr(ordered, _AFTER, first.controller)
    return ordered


def behind(x: Any, results: Any) -> Any:
    """Results of what communicates a tensor, behind what that remembers."""
    if (edge := getattr(x, _AFTER, None)) is not None:
        first = results[0] if isinstance(results, list | tuple) else results
        first.node.input.append(edge)
    return results


def _emit_all_to_all(ge: Any, x: Any, received: list[int], sent: list[int], group: str) -> Any:
    if len({*received, *sent}) == 1:
        return ge.HcomAllToAll(x, group=group)
    row = math.prod(x.symsize[1:])
    counts = []
    for rows in (sent, received):
        elements = [row * count for count in rows]
        counts += [elements, [0, *itertools.accumulate(elements)][:-1]]
    return ge.HcomAllToAllV(x, *(ge.Const(values, dtype=_DT_INT64) for values in counts), group=group)


def _ge_reduction(how: str) -> str:
    if how not in REDUCTIONS:
        raise LoweringError(f"a collective reduces by {how!r}, GE by {', '.join(sorted(REDUCTIONS))}")
    return REDUCTIONS[how]


def _convert_wait(ta: Any, earlier: Any) -> Any:
    """GE runs a reader after its inputs anyway; the Identity that torchair emits would be one more kernel."""
    return lambda x, *, meta_outputs=None: x


def _collective_work(op: Node, facts: work.Facts, received: Callable[[float, float, int], float], steps: int = 1) -> work.Work:
    group = op.group
    if group not in facts.groups:
        raise LoweringError(f"{op.name} ({op.type}) communicates over {group!r}; the mesh has {', '.join(sorted(facts.groups))}")
    given, result = facts.types[op.input[0]].nbytes, facts.types[f"{op.name}:0"].nbytes
    return work.Work(sent_bytes=received(given, result, facts.groups[group]), group=group, steps=steps)


def _product_and_sum_work(op: Node, facts: work.Facts) -> tuple[work.Work, work.Work]:
    """A product, whose result each rank of the group gets its rows of the sum of."""
    ranks = facts.groups[op.group]
    left, out = facts.types[op.input[0]], facts.types[f"{op.name}:0"]
    whole = float(out.nbytes * ranks)
    ops = 2.0 * work.padded_rows(left.shape[0]) * out.shape[-1] * left.shape[-1]
    product = replace(work.bytes_moved(facts, work.whole_tensors(facts, op.reads)), bf16_ops=ops * (2 if left.dtype == "f32" else 1))
    return product, work.Work(sent_bytes=whole * (ranks - 1) / ranks, group=op.group)


def _collective(
    name: str,
    kinds: str,
    form: tuple[GroupKernel, int, int | None],
    emit: Callable[..., Any],
    run: Any,
    received: Callable[[float, float, int], float],
    steps: int = 1,
    **more: Any,
) -> NpuOperator:
    """A collective of torch.

    Args:
        form: its kernel, and the positions of its group and of the number of members, None where it does not name it.
        emit: writes its GE operator.
        received: bytes that a rank gets, of what it gives, of its result, and of the number of ranks.
    """
    kernel, group, size = form
    rule = functools.partial(_collective_work, received=received, steps=steps)
    overload = f"_c10d_functional.{name}.default"
    return NpuOperator(
        tuple(kinds.split()),
        torch=(TorchForm(overload, group_kernel=kernel, group=(group, "group_name"), size=size),),
        converters={overload: _over_groups(emit)},
        run_group=run,
        work=rule,
        collective=name,
        trial=_TRIAL,
        **more,
    )


_TRIAL = Trial(wrong="communicators")
OPERATORS = (
    NpuOperator(converters={"_c10d_functional.wait_tensor.default": _convert_wait}),
    _collective(
        "all_reduce",
        "HcomAllReduce",
        (all_reduce, 2, None),
        lambda ge, x, how, group: ge.HcomAllReduce(x, reduction=_ge_reduction(how), group=group, fusion=_UNFUSED),
        _all_reduce,
        lambda given, result, n: 2 * given * (n - 1) / n,
        steps=2,
        types=type_rules.same,
    ),
    _collective(
        "all_gather_into_tensor",
        "HcomAllGather",
        (all_gather_into_tensor, 2, 1),
        lambda ge, x, size, group: ge.HcomAllGather(x, rank_size=size, group=group),
        _all_gather,
        lambda given, result, n: result * (n - 1) / n,
    ),
    _collective(
        "reduce_scatter_tensor",
        "HcomReduceScatter",
        (reduce_scatter_tensor, 3, 2),
        lambda ge, x, how, size, group: ge.HcomReduceScatter(x, reduction=_ge_reduction(how), group=group, rank_size=size),
        _reduce_scatter,
        lambda given, result, n: given * (n - 1) / n,
    ),
    NpuOperator(
        acl=("aclnnMatmulReduceScatterV2",),
        torch=(
            TorchForm(
                "npu.npu_mm_reduce_scatter_base.default",
                group_kernel=npu_mm_reduce_scatter_base,
                group=(2, "hcom"),
                size=3,
                takes_transposed=True,
            ),
        ),
        stages=_product_and_sum_work,
        collective="reduce_scatter_tensor",
    ),
    _collective(
        "all_to_all_single",
        "HcomAllToAll",
        (all_to_all_single, 3, None),
        _emit_all_to_all,
        _all_to_all,
        lambda given, result, n: given * (n - 1) / n,
    ),
    NpuOperator(
        ("HcomAllToAllV",),
        run_group=_all_to_all_v,
        # Buffers of an uneven exchange are sized for the worst case; tokens spread evenly, up to the imbalance, fill what was given.
        work=functools.partial(_collective_work, received=lambda given, result, n: min(given, result) * (n - 1) / n),
        collective="all_to_all_single",
        trial=_TRIAL,
    ),
    _collective(
        "broadcast",
        "HcomBroadcast",
        (broadcast, 2, None),
        lambda ge, x, source, group: ge.HcomBroadcast([x], root_rank=source, group=group, fusion=_UNFUSED)[0],
        _broadcast,
        lambda given, result, n: result * (n - 1) / n,
        types=type_rules.same,
    ),
)
