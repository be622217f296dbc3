"""What a device demands of a graph of torch operators when it is captured or first run, and would not say so clearly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ....graphs.errors import LoweringError
from ...artifact import graph_io
from ..acl_graph.formats import fills_tiles, weight_operands, weights_of
from ..acl_graph.program import AclProgram, Call, Segment
from ..operators.table import BY_TARGET, FORMS, GROUP_ARGUMENTS
from .emulated_graph import DeviceState
from .memory import FORMAT_NAMES, ND, NZ, DeviceTensor

MAX_STREAMS = 1800
"""Streams that captured graphs of one process may take. A device has 2048; vllm-ascend keeps 248 for everything else
(vllm-project/vllm-ascend issues 1168 and 8585)."""

# Their results have static sizes unless an index is a mask; torch tags them as dynamic for that.
_INDEXED = ("aten.index.Tensor", "aten.index_put.default", "aten.index_put_.default")


def check_formats(program: AclProgram, operands: Sequence[torch.Tensor | None]) -> None:
    """Refuses operands in formats that their readers do not take.

    The first product of experts in int8 takes NZ alone: documentation of aclnnGroupedMatmulSwigluQuantV2 in Ascend/op-plugin. So do fused
    experts in int4: aclnn_dispatch_ffn_combine_w4_a8.cpp of vllm-project/vllm-ascend, 182b75e.

    Raises:
        LoweringError: naming operator, operand and format.
    """
    weights = weight_operands(program.file)
    for number in sorted(program.reads):
        tensor, node = operands[number], program.nodes[number]
        name = program.leaves[number] or f"number {number}"
        if not isinstance(tensor, DeviceTensor):
            continue
        actual = FORMAT_NAMES[tensor.allocation.format]
        if tensor.allocation.format == NZ and (number not in weights or not fills_tiles(program.vals[number])):
            readers = ", ".join(str(reader.target) for reader in node.users)
            raise LoweringError(f"operand {name} is in {actual} and read by {readers}; legal is ND, or a product's weight with full tiles")
        if tensor.allocation.format == ND:
            for reader in node.users:
                form = FORMS.get(str(reader.target))
                if form is not None and form.only_nz == tensor.dtype and node in weights_of(reader):
                    dtype = str(tensor.dtype).removeprefix("torch.")
                    raise LoweringError(
                        f"{reader.name} ({reader.target}) takes {name}, {dtype} in {actual}; legal is NZ for {dtype} weights"
                    )


def check_communication(program: AclProgram, state: DeviceState, groups: Mapping[str, str], graph: str) -> None:
    """Refuses operators whose number of members or own rank differ from their communicator's, and communicators shared with the expert
    exchange (constraints of aclnnMoeDistributeDispatchV2, Ascend/op-plugin).

    Raises:
        LoweringError: naming operator, argument and what is legal.
    """
    for segment in program.segments:
        for call in segment.calls:
            if call.name in GROUP_ARGUMENTS:
                _check_call(call, state, groups, graph)


def _check_call(call: Call, state: DeviceState, groups: Mapping[str, str], graph: str) -> None:
    position, argument = GROUP_ARGUMENTS[call.name]
    group: Any = call.args[position] if len(call.args) > position else call.kwargs[argument]
    name = groups.get(group, group)
    if name not in state.communicators:
        raise LoweringError(
            f"{call.name} communicates over {name!r}; this process (rank {state.rank}) has {', '.join(state.communicators)}"
        )
    communicator = state.communicators[name]
    for what, at, legal in (
        ("members", FORMS[call.name].size, communicator.size),
        ("rank", FORMS[call.name].rank, communicator.index),
    ):
        if at is not None and call.args[at] != legal:
            raise LoweringError(f"{call.name}: {what} is {call.args[at]}; legal is {legal}, that of communicator {name!r}")
    exchange = BY_TARGET[call.name].exchange
    before = state.owners.setdefault(name, (exchange, f"{graph}/{call.name}"))
    if before[0] != exchange:
        raise LoweringError(
            f"communicator {name!r} is used by {before[1]} and by {graph}/{call.name}; legal is a communicator of its own for"
            f" {exchange or before[0]}"
        )


def check_segment(program: AclProgram, segment: Segment, state: DeviceState, groups: Mapping[str, str]) -> None:
    """Refuses operators that cannot be captured, and more captured graphs than a device has streams for.

    A captured operator may not wait for the device: no size or branch may depend on what it computes (docs/zh/developer_notes/npugraph.md
    of Ascend/pytorch).

    Raises:
        LoweringError: naming the operator, or both numbers of streams.
    """
    for call in segment.calls:
        if not call.name.startswith("aten."):
            continue
        target: Any = graph_io.find_target(call.name)
        by_value = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(target.tags)
        if by_value and not (call.name in _INDEXED and not _has_mask(program, call)):
            raise LoweringError(f"{program.nodes[call.number].name} ({call.name}) needs the values of its operands; it cannot be captured")
    # A captured graph takes a stream of its own, and one for each communicator that it uses.
    state.streams += 1 + len({groups.get(str(group), str(group)) for group in _groups(segment)})
    if state.streams > MAX_STREAMS:
        raise LoweringError(f"captured graphs take {state.streams} streams; legal are {MAX_STREAMS}: build fewer buckets")


def _groups(segment: Segment) -> list[Any]:
    groups = []
    for call in segment.calls:
        if call.name in GROUP_ARGUMENTS:
            position, argument = GROUP_ARGUMENTS[call.name]
            groups.append(call.args[position] if len(call.args) > position else call.kwargs[argument])
    return groups


def _has_mask(program: AclProgram, call: Call) -> bool:
    return any(program.vals[index].dtype == torch.bool for index in call.args[1] if index is not None)
