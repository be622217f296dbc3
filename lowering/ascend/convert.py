"""Converts one flat body of NPU operators into GE operators with torchair; writes those of operands and results as torchair does."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ...graphs.errors import LoweringError
from ...graphs.types import DTYPE_NAMES
from . import converters
from .ge_file import GE_DTYPES, GROUP, LEGAL_GROUPS, RANK, is_symbol, messages, parse
from .inspect_ge import follow_memory
from .operators.table import COMMUNICATING, IN_PLACE
from .recorded_values import RecordedValues
from .toolchain.harness import Torchair

# Options that list operands or results one by one; the linker writes them for the whole graph.
POSITIONAL = (
    "ge.exec.outputReuseMemIndexes",
    "ge.exec.outputReuseInputMemIndexes",
    "ge.inputHintShape",
    "frozenInput",
)
_GROUP_ATTRS, _RANK_ATTR = ("group", "group_ep", "group_tp"), "ep_rank_id"


@dataclass(frozen=True)
class Port:
    """One result of an operator: its tensor (`name:port`) and its abstract value."""

    tensor: str
    val: torch.Tensor


@dataclass(frozen=True)
class GeBody:
    """GE operators of one body, without those for its operands and results.

    Attributes:
        ops: OpDef messages, each after those it reads.
        feeds: tensor -> operand, for the operands that are read.
        results: one for each result of the body; its tensor is in `feeds` where the result is an operand.
        written: operand -> its value after the body, for operands that the body writes.
        donated: those of `written` whose new value is in other memory, or is read by nobody else: a GE output must be bound to the
            operand to carry it.
        control: `name:-1` of operators that must run although nobody reads them.
        patches: (operator, attribute, kind) of what differs between ranks.
        options: compile options of the body, without `POSITIONAL`.
        engine: options of the engine.
    """

    ops: tuple[Any, ...]
    feeds: Mapping[str, int]
    results: tuple[Port, ...]
    written: Mapping[int, Port]
    donated: frozenset[int]
    control: tuple[str, ...]
    patches: tuple[tuple[str, str, str], ...]
    options: Mapping[str, str]
    engine: Mapping[str, str]


def convert_body(gm: fx.GraphModule, ta: Torchair, name: str = "body") -> GeBody:
    """Runs torchair on one body.

    Args:
        gm: flat tensor placeholders with fake `meta["val"]` on device meta, of one FakeTensorMode; a tuple of results.
        ta: torchair, loaded.
        name: of the body, for errors.

    Raises:
        LoweringError: torchair refuses the body, or it has a form that is not lowered here; names the body.
    """
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    vals = [_operand(name, node) for node in placeholders]
    returned: Any = gm.graph.output_node().args[0]
    if not isinstance(returned, tuple | list) or not all(isinstance(node, fx.Node) for node in returned):
        raise LoweringError(f"{name} returns {returned}; legal is a tuple of nodes")
    converters.register(ta)
    runner = _run(name, gm, vals, ta)
    if missing := [i for i in range(len(returned)) if i not in runner._fx_outputs_mapping]:
        # torchair does not count a tensor that shares memory with an operand as a result of the graph.
        gm = _unaliased(gm, missing, ta)
        runner = _run(name, gm, vals, ta)
    if dropped := [str(returned[i]) for i in range(len(returned)) if i not in runner._fx_outputs_mapping]:
        raise LoweringError(f"{name}: results {dropped} are no tensors with elements; a body can return nothing else")
    operands = {str(node.target): i for i, node in enumerate(placeholders)}
    return _body(name, runner, operands, vals, [node.meta["val"] for node in returned], _values(gm))


def shape_of(val: torch.Tensor) -> str:
    """Type and sizes as in `bf16[16,2,256]`."""
    return f"{DTYPE_NAMES.get(val.dtype, str(val.dtype))}[{','.join(map(str, val.shape))}]"


def describe(desc: Any, value: torch.Tensor, name: str, device: str = "") -> Any:
    """Fills an operator's description of an input or output."""
    desc.name, desc.layout, desc.device_type = name, "ND", device
    desc.dtype = messages().DataType.Value(GE_DTYPES[value.dtype][0])
    desc.shape.dim.extend(value.shape)
    return desc


def describe_output(op: Any, value: torch.Tensor, device: str = "") -> None:
    """Adds the one output of an operator, with the text of its type."""
    describe(op.output_desc.add(), value, "y", device).attr["_meta"].s = shape_of(value).encode()


def name_ports(op: Any) -> None:
    """Adds the attributes from which GE reads the names of inputs and outputs and their positions."""
    for side, descs in (("input", op.input_desc), ("output", op.output_desc)):
        op.attr[f"_{side}_name_key"].list.s.extend(desc.name.encode() for desc in descs)
        op.attr[f"_{side}_name_value"].list.i.extend(range(len(descs)))


def add_data(ops: Any, index: int, name: str, value: torch.Tensor) -> None:
    """Adds the operator of an operand."""
    op = ops.add(name=name, type="Data")
    op.attr["index"].i = index
    describe(op.input_desc.add(), value, "x", "NPU")
    describe_output(op, value, "NPU")
    name_ports(op)


def add_outputs(graph: Any, tensors: Sequence[tuple[str, torch.Tensor]], controls: Sequence[str], operands: int) -> None:
    """Adds the operator of all results, and the attributes of a whole graph, of so many operands."""
    op = graph.op.add(name="NetOutput", type="NetOutput")
    for i, (tensor, value) in enumerate(tensors):
        op.input.append(tensor)
        describe(op.input_desc.add(), value, f"input{i}")
    op.input.extend(controls)
    name_ports(op)
    graph.attr["_output_dtypes"].list.i.extend(GE_DTYPES[value.dtype][1] for _, value in tensors)
    graph.attr["_input_placements"].list.i.extend([1] * operands)
    graph.attr["_executor_type"].i = 1


def _operand(name: str, node: fx.Node) -> FakeTensor:
    val = node.meta.get("val")
    if not isinstance(val, FakeTensor) or val.device.type != "meta" or not val.is_contiguous():
        raise LoweringError(f"{name}: operand {node.name} is {val!r}; legal are contiguous fake tensors on device meta")
    if val.dtype not in GE_DTYPES:
        raise LoweringError(f"{name}: operand {node.name} has dtype {val.dtype}; legal are {', '.join(map(str, GE_DTYPES))}")
    return val


def _run(name: str, gm: fx.GraphModule, vals: list[FakeTensor], ta: Torchair) -> Any:
    config: Any = ta.CompilerConfig()
    # Fused operators are emitted by the lowerings: what a plain pattern becomes must not depend on torchair's release.
    config.experimental_config.pattern_fusion_pass = False
    mode = vals[0].fake_mode if vals else FakeTensorMode()
    try:
        # Autograd's bookkeeping of views would refuse a recorded value as the result of one.
        with mode, RecordedValues(gm), torch._C._AutoDispatchBelowADInplaceOrView():
            return ta.get_compiler(config)(gm, vals).runner
    except Exception as error:
        raise LoweringError(f"torchair cannot convert {name}: {_brief(error)}") from error


def _brief(error: Exception) -> str:
    """The message without the tracebacks that torchair and torch append to it."""
    text = str(error).split("\nOriginal traceback")[0].split("\nTraceback")[0]
    return f"{type(error).__name__}: " + " ".join(line.strip() for line in text.splitlines() if line.strip())


def _new_tensor(x: torch.Tensor) -> torch.Tensor:
    """A new tensor for torchair, which must not see the alias; its converter gives GE the tensor itself."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _unaliased(gm: fx.GraphModule, results: list[int], ta: Torchair) -> fx.GraphModule:
    """A copy of the body whose given results are new tensors for torchair."""
    ta.register_converter(_new_tensor)(lambda x: x)
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    returned: Any = graph.graph_copy(gm.graph, copied)
    nodes = list(returned)
    for i in results:
        val = nodes[i].meta["val"]
        nodes[i] = graph.call_function(_new_tensor, (nodes[i],))
        nodes[i].meta["val"] = val
    graph.output(tuple(nodes))
    return fx.GraphModule(gm, graph)


def _values(gm: fx.GraphModule) -> dict[str, Any]:
    return {node.name: node.meta.get("val") for node in gm.graph.nodes if node.op == "call_function"}


def _body(
    name: str, runner: Any, operands: Mapping[str, int], vals: list[FakeTensor], results: list[torch.Tensor], values: Mapping[str, Any]
) -> GeBody:
    graph = parse(runner.graph.SerializeToString()).graph[0]
    by_index = {op.attr["index"].i: operands[op.name] for op in graph.op if op.type == "Data"}
    feeds = {f"{op.name}:0": by_index[op.attr["index"].i] for op in graph.op if op.type == "Data"}
    outputs = next(op for op in graph.op if op.type == "NetOutput")
    ops = _needed([op for op in graph.op if op.type not in ("Data", "NetOutput")], outputs)
    tensors = [tensor for tensor in outputs.input if not tensor.endswith(":-1")]
    flow = follow_memory(ops, feeds)
    if flow.breaches:
        raise LoweringError(f"{name}: " + "; ".join(flow.breaches))
    carried = {by_index[index]: tensors[output] for output, index in runner._graph_output_ref_input.items()}
    written = {i: flow.latest[i] for i in flow.writers} | carried
    for op in ops:
        _tidy(op, values)
    local, engine = runner._normalize_ge_option()
    return GeBody(
        ops=ops,
        feeds=feeds,
        results=tuple(Port(tensors[runner._fx_outputs_mapping[i]], val) for i, val in enumerate(results)),
        written={i: Port(tensor, vals[i]) for i, tensor in written.items()},
        donated=frozenset(carried),
        control=tuple(tensor for tensor in outputs.input if tensor.endswith(":-1")),
        patches=tuple(patch for op in ops for patch in _patches(name, op)),
        options={key: value for key, value in local.items() if key not in POSITIONAL},
        engine=dict(engine),
    )


def _needed(ops: Sequence[Any], outputs: Any) -> tuple[Any, ...]:
    """The operators that a result depends on, and those that write operands or communicate, with all that they read.

    torchair converts each result of an aten operator, read or not: it casts the indices of a maximum of which only the value is read.
    """
    needed = {tensor.rpartition(":")[0] for tensor in outputs.input}
    kept = []
    for op in reversed(ops):
        if op.name in needed or op.type in IN_PLACE or op.type in COMMUNICATING:
            kept.append(op)
            needed |= {tensor.rpartition(":")[0] for tensor in op.input}
    return tuple(reversed(kept))


def _tidy(op: Any, values: Mapping[str, Any]) -> None:
    """Writes each output's own shape; torchair leaves the shape of the output's last view there, and names of FX nodes."""
    for desc in op.input_desc:
        for key in ("_meta", "_fx_tensor_name"):
            if key in desc.attr:
                del desc.attr[key]
    for desc in op.output_desc:
        origin = desc.attr["_fx_tensor_name"].s.decode() if "_fx_tensor_name" in desc.attr else ""
        val = _value(values, origin)
        for key in ("_meta", "_fx_tensor_name"):
            if key in desc.attr:
                del desc.attr[key]
        if isinstance(val, torch.Tensor):
            desc.attr["_meta"].s = shape_of(val).encode()


def _value(values: Mapping[str, Any], origin: str) -> Any:
    """Abstract value of an output named `node-target.OUTPUT.index`; None where the graph has no such node."""
    match = re.fullmatch(r"(\w+)-.*\.OUTPUT\.(\d+)", origin)
    val = values.get(match[1]) if match else None
    return val[int(match[2])] if match and isinstance(val, tuple | list) else val


def _patches(name: str, op: Any) -> list[tuple[str, str, str]]:
    patches = [(op.name, _RANK_ATTR, RANK)] if _RANK_ATTR in op.attr else []
    for key in _GROUP_ATTRS:
        if group := op.attr[key].s.decode() if key in op.attr else "":
            if not is_symbol(group):
                raise LoweringError(f"{name}: {op.name} has {key} {group!r}; legal are {LEGAL_GROUPS}")
            patches.append((op.name, key, GROUP))
    return patches
