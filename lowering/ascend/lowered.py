"""Turns a partitioned graph into calls of bodies of NPU operators: each kind of layer is lowered once and writes its pools in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Interpreter

from ...graphs import compile_count
from ...graphs.ir.flatten import bodies
from ...graphs.ir.outline import outline
from ...graphs.ir.record import record
from ...graphs.primitive import of_target
from ..calls import calls_of
from ..donation import Donated, donations
from ..lower import LoweredProgram
from ..platform import CPU, Platform
from . import index_bounds, packages
from .hoist import hoist
from .share import share

if TYPE_CHECKING:
    from ...graphs.spmd.partition import PartitionedProgram

KIND = "npu"
"""Kind of lowering that bodies are made of."""


def lower(partitioned: PartitionedProgram, platform: Platform = CPU, backend: str = "ge") -> LoweredProgram:
    """Lowers every body once; `npu` and `air` operators must be registered in this process.

    Args:
        platform: decides which variant of a primitive's lowering is taken.
        backend: name of the backend that runs the graph.

    Raises:
        LoweringError: a state pool cannot be updated in place (donation.py).
    """
    compile_count.record("trace")
    packages.declare()
    graph, signature = outline(partitioned.graph), partitioned.signature
    donated = donations(graph, signature)
    features = platform.features(backend)
    lowered = {name: _lower_body(body, donated.bodies[name], features) for name, body in bodies(graph).items()}
    calls = calls_of(graph, signature, donated, lowered)
    runs = bodies(graph).keys() - bodies(partitioned.graph).keys()
    calls = hoist(share(calls, signature, runs), signature)
    index_bounds.check(calls, partitioned.program.bucket.name)
    return LoweredProgram(partitioned.program.bucket, backend, calls, signature, platform, partitioned.mesh)


class _NpuInliner(Interpreter):
    """Runs a body on meta tensors with primitives replaced by their lowerings for a platform's features."""

    def __init__(self, body: GraphModule, features: frozenset[str]) -> None:
        super().__init__(body)
        self._features = features

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        primitive = of_target(target)
        if primitive is not None:
            return primitive.lower_for(KIND, self._features)(*args, **kwargs)
        return super().call_function(target, args, kwargs)


def _lower_body(body: GraphModule, donated: Donated, features: frozenset[str]) -> GraphModule:
    """The body in operators of the device; new values of pools are written into their operands and are no results."""
    operands = [n.meta["val"] for n in body.graph.nodes if n.op == "placeholder"]
    new_values = set(donated.values())

    def run(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = _NpuInliner(body, features).run(*values)
        for operand, result in donated.items():
            # An operator that updated the operand in place has returned the operand itself.
            if results[result] is not values[operand]:
                values[operand].copy_(results[result])
        return tuple(value for i, value in enumerate(results) if i not in new_values)

    graph = record(run, operands, FakeTensorMode())
    graph.recompile()
    return graph
