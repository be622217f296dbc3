"""Turns a program into the graph that one device of a mesh runs, by tracing it through DTensor."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._utils import ExplicitRedistributionContext
from torch.distributed.tensor.experimental import implicit_replication
from torch.fx import GraphModule, Node
from torch.testing._internal.distributed.fake_pg import FakeStore

from ..errors import PartitionError
from ..ir.flatten import bodies
from ..ir.trace import TracedProgram, call_flat, name_placeholders, signature_of, trace, traced_graph
from ..primitive import of_target
from ..stage import Stage
from ..types import COORDS, MANUAL_AXIS, MESH_AXES, Aval, Function, Leaf, Mesh, Program, Rules, Signature, axis_group, leaf_name
from .layout import PartitionContext, partitioning
from .placement import assembled, local_of, logical_axes, placements
from .sharding import register_all

EXPLICIT = ("experts",)
"""Logical axes that may be split over the manual axis: only regions read values that carry them."""

_TORCH, _GRAPHS = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])


@dataclass(frozen=True)
class PartitionedProgram(Stage):
    """The graph of one device: local shapes, explicit collectives. Its signature holds local avals."""

    program: Program
    graph: GraphModule
    signature: Signature
    mesh: Mesh
    rules: Rules

    @property
    def title(self) -> str:
        return f"{self.program.bucket.name} partitioned over mesh {self.mesh}"

    @property
    def collectives(self) -> tuple[tuple[str, str, str], ...]:
        """(collective, group, type) of every communication, in program order: what all ranks of a group must share."""
        return tuple(_collectives(self.graph))


def _collectives(graph: GraphModule) -> Iterator[tuple[str, str, str]]:
    inner = {name: tuple(_collectives(body)) for name, body in bodies(graph).items()}
    for node in graph.graph.nodes:
        if node.op == "call_module":
            yield from inner[str(node.target)]
        elif (group := collective_group(node)) is not None:
            value = node.meta["val"]
            first = value[0] if isinstance(value, (list, tuple)) else value
            yield node.target._opname, group, str(Aval(tuple(first.shape), first.dtype))


def collective_group(node: Node) -> str | None:
    """Name of the group a node communicates over; None when it does not communicate."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    if target.namespace == "_c10d_functional":
        return None if "wait" in target._opname else str(node.args[-1])
    primitive = of_target(target)
    if primitive is None or not primitive.has("group_reference"):
        return None
    return str(node.args[[argument.name for argument in target._schema.arguments].index("group")])


def partition(source: TracedProgram | Program, mesh: Mesh, rules: Rules) -> PartitionedProgram:
    """Splits a program over a mesh; a mesh of one device leaves it as it is.

    The program of a step is written for one group of the mesh's manual axis. Within the group parameters and state enter as DTensors
    placed by `rules`, inputs replicated; primitives follow their factor strings, `constrain` marks where layouts change,
    and regions (graphs/spmd/region.py) hold the explicit communication, across groups too. No device is needed: collectives go to
    a fake process group of the mesh's size. Groups have symbolic names in the graph, an axis or "world", and the position of
    a device is an input, `inputs.coords` i32 (`Mesh.coords`): one graph serves all ranks.

    A function has no manual axis: its mesh may have axes of any names, and its outputs may end split, by the axes of their avals.

    Args:
        source: a program or its traced graph, which only a mesh of one device uses.

    Raises:
        PartitionError: when the mesh has an axis that a step has not, sizes do not divide, axes collide, an operator has no sharding
            rule, or a result ends in another layout than its operand had.
    """
    program = source.program if isinstance(source, TracedProgram) else source
    signature, manual = signature_of(program), "" if isinstance(program.bucket, Function) else MANUAL_AXIS
    _check(mesh, rules, manual)
    for leaf in signature.operands:
        rules.check(leaf.aval, mesh, leaf.name)
    if mesh.size == 1:
        traced = source if isinstance(source, TracedProgram) else trace(program)
        return PartitionedProgram(program, traced.graph, traced.signature, mesh, rules)
    register_all()
    full, axes = mesh.complete, _device_axes(mesh, manual)
    groups, position = Mesh(((manual, mesh.axis(manual)),)), Aval((len(full.axes),), torch.int32)
    with _fake_devices(full, axes) as devices:
        grouped = [rules.local_aval(leaf.aval, groups) for leaf in signature.operands]
        local = [rules.local_aval(leaf.aval, full) for leaf in signature.operands]
        layouts = [placements(aval.axes, devices, rules) for aval in grouped]
        state_layouts = [*zip(signature.state, layouts[len(signature.params) : len(signature.params) + len(signature.state)], strict=True)]
        outputs: list[Leaf] = []

        def flat(*values: torch.Tensor) -> list[torch.Tensor]:
            wrapped = [assembled(v, devices, layout) for v, layout in zip(values, layouts, strict=False)]
            with partitioning(PartitionContext(rules, full, devices, values[-1])):
                results, leaves = call_flat(program, signature, wrapped)
            if not manual:
                leaves = [_split_output(leaf, r, mesh, rules, program) for leaf, r in zip(leaves, results, strict=False)]
            outputs.extend(leaves)
            ends = [*((leaf, placements(leaf.aval.axes, devices, rules)) for leaf in leaves), *state_layouts]
            return [_unwrap(r, end, leaf, program) for r, (leaf, end) in zip(results, ends, strict=True)]

        with implicit_replication(), _refusals(program), ExplicitRedistributionContext():
            graph = traced_graph(flat, [(a.shape, a.dtype) for a in (*local, position)])
        _name_groups(graph, {devices.get_group(axis).group_name: axis_group(axis) for axis in axes})
    leaves = [Leaf(leaf.name, aval) for leaf, aval in zip(signature.operands, local, strict=True)]
    params, state = len(signature.params), len(signature.state)
    inputs = (*leaves[params + state :], Leaf(leaf_name("inputs", COORDS), position))
    result = Signature(tuple(leaves[:params]), tuple(leaves[params : params + state]), inputs, tuple(outputs))
    name_placeholders(graph, result)
    return PartitionedProgram(program, graph, result, mesh, rules)


def _check(mesh: Mesh, rules: Rules, manual: str) -> None:
    if not manual:
        order = [name for name, _ in mesh.complete.axes]
        for logical, names in rules.table:
            own = [name for name in names if name in order]
            if own != sorted(own, key=order.index):
                raise PartitionError(f"rule {logical!r} -> {names}: legal is the order of the mesh's axes, {', '.join(order)}")
        return
    for name, _ in mesh.axes:
        if name not in MESH_AXES:
            raise PartitionError(f"mesh {mesh} has an axis {name!r}; legal are {', '.join(MESH_AXES)}")
    for logical, names in rules.table:
        if MANUAL_AXIS in names and logical not in EXPLICIT and mesh.axis(MANUAL_AXIS) > 1:
            raise PartitionError(
                f"rule {logical!r} -> {names}: {MANUAL_AXIS!r} holds groups with requests of their own; legal over it is "
                f"{', '.join(EXPLICIT)}"
            )


def _device_axes(mesh: Mesh, manual: str) -> tuple[str, ...]:
    """The axes that DTensor splits values over: all but the manual one; of a function only those that its mesh has."""
    return tuple(name for name, _ in mesh.complete.axes if name != manual and (manual or name in dict(mesh.axes)))


def _split_output(leaf: Leaf, value: torch.Tensor, mesh: Mesh, rules: Rules, program: Program) -> Leaf:
    """An output of a function as one device has it, with the logical axes that it is split over."""
    if not isinstance(value, DTensor) or all(isinstance(placement, Replicate) for placement in value.placements):
        return leaf
    if (axes := logical_axes(value, rules)) is None:
        raise PartitionError(
            f"{program.name}: {leaf.name} ends as {value.placements}; legal is whole, or split as the rules split an axis: constrain it"
        )
    return Leaf(leaf.name, rules.local_aval(Aval(leaf.aval.shape, leaf.aval.dtype, axes), mesh))


def _unwrap(value: torch.Tensor, layout: Sequence[Placement], leaf: Leaf, program: Program) -> torch.Tensor:
    if not isinstance(value, DTensor):
        return value
    if tuple(value.placements) != tuple(layout):
        raise PartitionError(
            f"{program.name}: {leaf.name} ends as {value.placements}, its layout must be {tuple(layout)}; constrain it in the model"
        )
    return local_of(value)


def _name_groups(graph: GraphModule, groups: Mapping[str, str]) -> None:
    """Replaces the names of DTensor's process groups by those of groups along axes, in the graph and its bodies."""
    for part in (graph, *bodies(graph).values()):
        for node in part.graph.nodes:
            target = node.target
            if isinstance(target, torch._ops.OpOverload) and target.namespace == "_c10d_functional" and node.args[-1] in groups:
                node.args = (*node.args[:-1], groups[node.args[-1]])
        part.recompile()


@contextmanager
def _refusals(program: Program) -> Iterator[None]:
    """Names the line of the model that DTensor cannot shard, or where it would redistribute a value that no `constrain` asks for."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, NotImplementedError) and "mplicit redistribution" not in str(error):
            raise
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((_TORCH, _GRAPHS))]
        where = f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "unknown line"
        raise PartitionError(f"{program.name}: {where}\n  {error}; constrain what it reads, or give it a sharding rule") from error


@contextmanager
def _fake_devices(mesh: Mesh, axes: tuple[str, ...]) -> Iterator[DeviceMesh]:
    """The devices along these axes of a mesh, on a fake process group of all its devices."""
    if dist.is_initialized():
        raise PartitionError("partitioning needs its own process group, but torch.distributed is initialised in this process")
    dist.init_process_group("fake", rank=0, world_size=mesh.size, store=FakeStore())
    try:
        names, sizes = zip(*mesh.axes, strict=True)
        yield init_device_mesh("cpu", sizes, mesh_dim_names=names)[axes]
    finally:
        dist.destroy_process_group()
