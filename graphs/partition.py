"""Turns a traced program into the graph one device of a mesh runs, by tracing it again through DTensor."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._utils import ExplicitRedistributionContext
from torch.distributed.tensor.experimental import implicit_replication
from torch.fx import GraphModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from .errors import PartitionError
from .layout import partitioning, placements
from .sharding import register_all
from .trace import Traced, call_flat, name_placeholders, traced_graph
from .types import Aval, Leaf, Mesh, Program, Rules, Signature

_TORCH, _GRAPHS = (str(Path(file).parent) for file in (torch.__file__, __file__))


@dataclass(frozen=True)
class Partitioned:
    """The graph of one device: local shapes, explicit collectives. Its signature holds local avals."""

    program: Program
    graph: GraphModule
    signature: Signature
    mesh: Mesh
    rules: Rules

    @property
    def collectives(self) -> tuple[tuple[str, str, str], ...]:
        """(collective, group, type) of every communication, in program order: what all ranks of a group must share."""
        found = []
        for node in self.graph.graph.nodes:
            target = node.target
            if isinstance(target, torch._ops.OpOverload) and target.namespace == "_c10d_functional" and "wait" not in target._opname:
                value = node.meta["val"]
                found.append((target._opname, str(node.args[-1]), str(Aval(tuple(value.shape), value.dtype))))
        return tuple(found)


def partition(traced: Traced, mesh: Mesh, rules: Rules) -> Partitioned:
    """Splits a program over a mesh.

    Parameters and state enter as DTensors placed by `rules`, inputs replicated; primitives follow their factor strings,
    `constrain` marks where layouts change. No device is needed: collectives go to a fake process group of the mesh's size.

    Raises:
        PartitionError: when sizes do not divide, axes collide, an operator has no sharding rule, or a result ends in
            another layout than its operand had.
    """
    program, signature = traced.program, traced.signature
    for leaf in signature.operands:
        rules.check(leaf.aval, mesh, leaf.name)
    register_all()
    with _fake_devices(mesh) as devices:
        layouts = [placements(leaf.aval.axes, devices, rules) for leaf in signature.operands]
        local = [_local(leaf.aval, layout, mesh) for leaf, layout in zip(signature.operands, layouts, strict=True)]
        ends: list[list[Placement]] = [placements((None,) * len(leaf.aval.shape), devices, rules) for leaf in signature.outputs]
        ends += layouts[len(signature.params) : len(signature.params) + len(signature.state)]

        def flat(*values: torch.Tensor) -> list[torch.Tensor]:
            wrapped = [_wrap(v, leaf, layout, devices) for v, leaf, layout in zip(values, signature.operands, layouts, strict=True)]
            results, _ = call_flat(program, signature, wrapped)
            return [_unwrap(r, end, leaf, program) for r, end, leaf in zip(results, ends, signature.results, strict=True)]

        with partitioning(rules), implicit_replication(), _refusals(program), ExplicitRedistributionContext():
            graph = traced_graph(flat, [(a.shape, a.dtype) for a in local])
    leaves = [Leaf(leaf.name, aval) for leaf, aval in zip(signature.operands, local, strict=True)]
    params, state = len(signature.params), len(signature.state)
    result = Signature(
        tuple(leaves[:params]), tuple(leaves[params : params + state]), tuple(leaves[params + state :]), signature.outputs
    )
    name_placeholders(graph, result)
    return Partitioned(program, graph, result, mesh, rules)


def _local(aval: Aval, layout: Sequence[Placement], mesh: Mesh) -> Aval:
    shape = list(aval.shape)
    for place, (_, size) in zip(layout, mesh.axes or (("one", 1),), strict=True):
        if isinstance(place, Shard):
            shape[place.dim] //= size
    return Aval(tuple(shape), aval.dtype, aval.axes)


def _wrap(value: torch.Tensor, leaf: Leaf, layout: Sequence[Placement], devices: DeviceMesh) -> torch.Tensor:
    strides = torch.empty(leaf.aval.shape, device="meta").stride()
    return DTensor.from_local(value, devices, layout, run_check=False, shape=torch.Size(leaf.aval.shape), stride=strides)


def _unwrap(value: torch.Tensor, layout: Sequence[Placement], leaf: Leaf, program: Program) -> torch.Tensor:
    if not isinstance(value, DTensor):
        return value
    if tuple(value.placements) != tuple(layout):
        raise PartitionError(
            f"{program.name}: {leaf.name} ends as {value.placements}, its place is {tuple(layout)}; constrain it in the model"
        )
    return value.to_local()


@contextmanager
def _refusals(program: Program) -> Iterator[None]:
    """Says which line of the model DTensor could not shard, or would have moved data for without being told to."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, NotImplementedError) and "mplicit redistribution" not in str(error):
            raise
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((_TORCH, _GRAPHS))]
        where = f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "unknown line"
        raise PartitionError(f"{program.name}: {where}\n  {error}; constrain what it reads, or give it a sharding rule") from error


@contextmanager
def _fake_devices(mesh: Mesh) -> Iterator[DeviceMesh]:
    """A device mesh over a fake process group; a mesh without axes has one axis of size 1."""
    if dist.is_initialized():
        raise PartitionError("partitioning needs its own process group, but torch.distributed is initialised in this process")
    axes = mesh.axes or (("one", 1),)
    dist.init_process_group("fake", rank=0, world_size=mesh.size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", tuple(size for _, size in axes), mesh_dim_names=tuple(name for name, _ in axes))
    finally:
        dist.destroy_process_group()
