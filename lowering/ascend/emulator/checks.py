"""What GE, HCCL and captures demand of a graph before it runs on a device, and would not say so clearly."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from ....graphs.errors import LoweringError
from ...artifact import graph_io
from ..acl_graph import formats as captured_formats
from ..acl_graph.program import AclProgram, GraphSegment
from ..acl_graph.program import TorchCall as AclCall
from ..ge_file import GROUPS, GeFile, parse
from ..inspect_ge import follow_memory
from ..nz_weights import fills_tiles, int4_words, is_weight, only_nz
from .device_state import DeviceState
from .ge_program import BORDER
from .memory import FORMAT_NAMES, ND, NZ, DeviceTensor
from .program import Step

MAX_STREAMS = 1800
"""Streams that captured graphs of one process may take. A device has 2048; vllm-ascend keeps 248 for everything else
(vllm-project/vllm-ascend issues 1168 and 8585)."""
_INT8, _INT32 = 3, 7
"""Numbers of dtypes in GE's messages."""
# Their results have static sizes unless an index is a mask; torch tags them as dynamic for that.
_INDEXED = ("aten.index.Tensor", "aten.index_put.default", "aten.index_put_.default")


# --- formats ---


def data_formats(graph: Any) -> dict[str, int]:
    """Format of each `Data` operator's tensor, as `update_formats` wrote it.

    Raises:
        LoweringError: nothing was written.
    """
    formats = {}
    for op in graph.op:
        if op.type == "Data":
            if "format_for_int" not in op.output_desc[0].attr:
                raise LoweringError(f"{op.name} has no storage format; legal is that formats are written before the graph is compiled")
            formats[f"{op.name}:0"] = op.output_desc[0].attr["format_for_int"].i
    return formats


def check_formats(graph: Any) -> None:
    """Refuses operands of a GE graph in formats that their readers do not take.

    A tensor in NZ is legal where every reader is a matrix product that takes it as its weight, itself or as int4, and where its tiles
    are filled. Two products of experts in int8 take no other format: the one with activation and rounding (documentation of
    aclnnGroupedMatmulSwigluQuantV2 in Ascend/op-plugin), and the one with a scale in float32 (grouped_matmul_def.cpp of
    hicann/ops-transformer, 8.5.0.alpha001).

    Raises:
        LoweringError: naming operator, input and format.
    """
    formats = data_formats(graph)
    described = {f"{op.name}:0": op.output_desc[0] for op in graph.op if op.type == "Data"}
    for tensor, number in formats.items():
        if number not in FORMAT_NAMES:
            raise LoweringError(f"{tensor} is in format number {number}; legal are {FORMAT_NAMES}")
        if number == NZ and not fills_tiles(described[tensor]):
            raise LoweringError(f"{tensor} is in NZ and its sizes {list(described[tensor].shape.dim)} do not fill its tiles; legal is ND")
    words = int4_words(graph.op)
    formats |= {tensor: formats[source] for tensor, source in words.items()}
    for op in graph.op:
        if f"{op.name}:0" in words:
            continue
        for tensor, slot in zip(op.input, (desc.name for desc in op.input_desc), strict=False):
            weight = is_weight(op.type, slot)
            dtype = described[tensor].dtype if tensor in described else None
            if formats.get(tensor) == NZ and not weight:
                raise LoweringError(f"{op.name} ({op.type}) takes {tensor}, which is in NZ, as {slot}; legal is ND, or a product's weight")
            if formats.get(tensor) == NZ and dtype == _INT32:
                raise LoweringError(f"{op.name} ({op.type}) takes {tensor}, int32 in NZ, as {slot}; legal is its Bitcast to int4")
            if formats.get(tensor) == ND and dtype == _INT8 and weight and only_nz(op):
                raise LoweringError(f"{op.name} ({op.type}) takes {tensor}, int8 in ND, as {slot}; legal is NZ for int8 weights")


def check_captured_formats(program: AclProgram, operands: Sequence[torch.Tensor | None]) -> None:
    """The same of a graph of torch operators: fused experts in int4 take NZ alone, too (aclnn_dispatch_ffn_combine_w4_a8.cpp of
    vllm-project/vllm-ascend, 182b75e).

    Raises:
        LoweringError: naming operator, operand and format.
    """
    weights = captured_formats.weight_operands(program.file)
    for number in sorted(program.reads):
        tensor, node = operands[number], program.nodes[number]
        if not isinstance(tensor, DeviceTensor):
            continue
        name, dtype = program.leaves[number] or f"number {number}", str(tensor.dtype).removeprefix("torch.")
        if tensor.allocation.format == NZ and number not in weights:
            readers = ", ".join(str(reader.target) for reader in node.users)
            raise LoweringError(f"operand {name} is in NZ and read by {readers}; legal is ND, or a product's weight with full tiles")
        for reader in node.users if tensor.allocation.format == ND else ():
            if captured_formats.only_nz(reader, node, tensor):
                raise LoweringError(f"{reader.name} ({reader.target}) takes {name}, {dtype} in ND; legal is NZ for {dtype} weights")


# --- communication ---


def check_communication(steps: Iterable[Step], state: DeviceState, graph: str) -> None:
    """Refuses operators that name another communicator, number of members or own number than this process has.

    Expert dispatch and combine share their communicator with no other operator of the process (constraints of
    aclnnMoeDistributeDispatchV2 in the documentation of Ascend/op-plugin).

    Args:
        graph: its name, for messages.

    Raises:
        LoweringError: naming operator and what is legal, or the communicator and both operators.
    """
    for step in steps:
        if not (name := step.group):
            continue
        if name not in state.communicators:
            known = ", ".join(sorted(state.communicators)) or "none"
            symbol = f"the symbol {name!r}, which was not replaced by a communicator" if name in GROUPS else repr(name)
            raise LoweringError(f"{step.label} communicates over {symbol}; this process (rank {state.rank}) has {known}")
        own = state.communicators[name]
        for what, number, legal in (("rank", step.rank, own.index), ("members", step.members, own.size)):
            if number not in (None, legal):
                raise LoweringError(
                    f"{step.label}: {what} is {number}; rank {state.rank} is member {own.index} of the {own.size} of {name!r}, so that"
                    f" {legal} is legal"
                )
        used_for, user = state.owners.setdefault(name, (step.exchange, f"{graph}/{step.label}"))
        if used_for != step.exchange:
            raise LoweringError(
                f"communicator {name!r} is used by {user} and by {graph}/{step.label}; legal is a communicator of its own for"
                f" {step.exchange or used_for}"
            )


# --- captures ---


def check_segment(program: AclProgram, segment: GraphSegment, state: DeviceState, groups: Collection[str]) -> None:
    """Refuses operators that cannot be captured, and more captured graphs than a device has streams for.

    A captured operator may not wait for the device: no size or branch may depend on what it computes (docs/zh/developer_notes/npugraph.md
    of Ascend/pytorch).

    Args:
        groups: communicators that it uses.

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
    # A captured graph takes its streams, and one for each communicator that it uses.
    state.streams += segment.streams + len(groups)
    if state.streams > MAX_STREAMS:
        raise LoweringError(f"captured graphs take {state.streams} streams; legal are {MAX_STREAMS}: build fewer buckets")


def _has_mask(program: AclProgram, call: AclCall) -> bool:
    return any(program.vals[index].dtype == torch.bool for index in call.args[1] if index is not None)


# --- files ---


def declared_model(ge_file: GeFile) -> Any:
    """The graph of a GE file as a `ModelDef`, whose results and writes are what the file declares.

    Raises:
        LoweringError: operators write other operands than the file declares, or constants, or NetOutput has another number of inputs.
    """
    model = parse(ge_file.graph)
    if len(model.graph) == 1:
        ops = [_bare(op) for op in model.graph[0].op]
        _check_writes(ops, ge_file)
        expected = ge_file.outputs + len(ge_file.donations)
        results = [list(op.input) for op in ops if op.type == "NetOutput"]
        if [len(set(tensors)) for tensors in results] != [expected] or len(results[0]) != expected:
            counts = [len(tensors) for tensors in results]
            raise LoweringError(f"NetOutput has {counts} inputs; legal is one with {expected} of them, all different")
    return model


def _check_writes(ops: Sequence[Any], ge_file: GeFile) -> None:
    """Refuses graphs whose operators write other operands than the GE file declares, or constants."""
    memory = {f"{op.name}:0": ge_file.data[op.attr["index"].i] for op in ops if op.type == "Data"}
    constants = [f"{op.name}:0" for op in ops if op.type == "Const"]
    memory |= {tensor: ge_file.operands + i for i, tensor in enumerate(constants)}
    flow = follow_memory([op for op in ops if op.type not in BORDER], memory)
    written = {*flow.writers, *(flow.operand[op.input[0]] for op in ops if op.type == "Assign" and op.input[0] in flow.operand)}
    breaches = [f"an operator writes the constant {constants[i - ge_file.operands]}" for i in sorted(written) if i >= ge_file.operands]
    donated = {operand for _, operand in ge_file.donations}
    if written - donated != set(ge_file.bound) - donated:
        declared = f"{sorted(ge_file.bound)} bound and {sorted(donated)} donated"
        breaches.append(f"operators write operands {sorted(written)}, the GE file has {declared}")
    if breaches := [*flow.breaches, *breaches]:
        raise LoweringError("; ".join(breaches))


def _bare(op: Any) -> Any:
    """The operator without control edges, which do not count as inputs where inputs are numbered."""
    if not any(tensor.endswith(":-1") for tensor in op.input):
        return op
    bare = type(op)()
    bare.CopyFrom(op)
    bare.input[:] = [tensor for tensor in op.input if not tensor.endswith(":-1")]
    return bare
