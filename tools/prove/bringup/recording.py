"""Records on the CPU what the operators of a GE graph see in a step, so that operands for single operators and layers are legal."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....graphs.types import COORDS, Aval, Bucket, Leaf, Mesh, Signature, leaf_name
from ....lowering.artifact.artifact import Artifact
from ....lowering.artifact.shards import local_signature
from ....lowering.ascend.acl_graph.file import AclFile
from ....lowering.ascend.emulator.ge_program import BORDER, GeProgram, parsed_shape
from ....lowering.ascend.emulator.interpreter import Interpreter
from ....lowering.ascend.emulator.program import MeshExchange
from ....lowering.ascend.fold import evaluate, sources
from ....lowering.ascend.ge_file import GeFile, messages
from ....lowering.ascend.ge_types import tensor_types
from ....lowering.ascend.operators.call import INT4, read
from ....lowering.ascend.operators.tensor_type import TensorType
from ....lowering.ascend.shipped import ShippedGraph, shipped_graph
from ....lowering.ascend.subgraph import WholeGraph
from ....runtime.device_params import LoadParams
from .steps import PlannedStep

Values = dict[str, torch.Tensor]
DERIVED = "derived"
"""Part of the names of values that are derived from parameters when these are loaded."""


@dataclass(frozen=True)
class ShippedBucket:
    """The graph of a bucket with what is needed to feed it."""

    file: ShippedGraph
    bucket: Bucket
    signature: Signature

    def interpreter(self, mesh: Mesh) -> Interpreter:
        """Runs the graph on all ranks of a mesh on the CPU."""
        return Interpreter(self.file, mesh)


class CapturedBucket(ShippedBucket):
    """The captured graph of a bucket."""

    file: AclFile


class BucketGraph(ShippedBucket):
    """The GE graph of a bucket."""

    file: GeFile

    @functools.cached_property
    def whole(self) -> WholeGraph:
        """Its operators."""
        return WholeGraph(self.file)

    @property
    def operand(self) -> Mapping[str, Leaf]:
        """Leaf of each tensor that is an operand."""
        data = self.whole.ge_file.data
        ops = (op for op in self.whole.ops.values() if op.type == "Data")
        return {f"{op.name}:0": self._leaf(f"{op.name}:0", data[op.attr["index"].i]) for op in ops}

    def _leaf(self, tensor: str, operand: int) -> Leaf:
        """An operand of the program, or a value that is derived from parameters, as `derived.0`."""
        if operand < len(self.signature.operands):
            return self.signature.operands[operand]
        kind = parsed_shape(self.declared(tensor))
        assert kind is not None
        return Leaf(leaf_name(DERIVED, str(operand - len(self.signature.operands))), Aval(kind[1], kind[0]))

    def declared(self, tensor: str) -> str:
        """Dtype and sizes of a tensor as the graph declares them or as they follow from its operators, or "" where neither tells."""
        desc = self.whole.producer(tensor).output_desc[int(tensor.rpartition(":")[2])]
        if "_meta" in desc.attr:
            return str(desc.attr["_meta"].s.decode())
        return str(TensorType(known.dtype, known.shape)) if (known := self._types.get(tensor)) else ""

    @functools.cached_property
    def _types(self) -> Mapping[str, TensorType]:
        return tensor_types(self.whole.ge_file)


def shipped_buckets(artifact: Artifact) -> list[ShippedBucket]:
    """The graphs of an artifact, smallest bucket first; those of GE can be taken apart."""
    graphs = []
    for entry in sorted(artifact.manifest.graphs, key=lambda entry: (entry.bucket.tokens, entry.bucket)):
        file = shipped_graph(artifact, entry)
        assert file is not None
        graphs.append(_bucket(file, entry.bucket, local_signature(artifact.manifest, entry)))
    return graphs


@functools.singledispatch
def _bucket(file: ShippedGraph, bucket: Bucket, signature: Signature) -> ShippedBucket:
    raise TypeError(f"{type(file).__name__} is no graph for NPUs")


_bucket.register(GeFile, BucketGraph)
_bucket.register(AclFile, CapturedBucket)


def distinct_bodies(graph: BucketGraph) -> dict[str, list[str]]:
    """The first call of each body, by its prefix, with its operators; equal operators, shapes and constants make the same body."""
    distinct: dict[bytes, str] = {}
    bodies = graph.whole.bodies()
    for prefix, names in bodies.items():
        distinct.setdefault(_digest(graph, prefix, names), prefix)
    return {prefix: bodies[prefix] for prefix in distinct.values()}


def _digest(graph: BucketGraph, prefix: str, names: Sequence[str]) -> bytes:
    outside: dict[str, int] = {}
    digest = hashlib.sha256()
    for name in names:
        op = messages().OpDef()
        op.CopyFrom(graph.whole.ops[name])
        op.name = name.removeprefix(prefix)
        for i, tensor in enumerate(op.input):
            if tensor.startswith(f"{prefix}/"):
                op.input[i] = tensor.removeprefix(prefix)
            elif tensor:
                op.input[i] = f"{outside.setdefault(tensor, len(outside))} {graph.declared(tensor)}"
        digest.update(op.SerializeToString(deterministic=True))
    return digest.digest()


def _skipped(graph: BucketGraph) -> tuple[set[str], list[str]]:
    """Operators of repeated bodies that give floats alone, and those of their tensors that other operators read."""
    first, bodies = distinct_bodies(graph), graph.whole.bodies()
    absent: set[str] = set()
    drawn: list[str] = []
    for prefix, names in bodies.items():
        if prefix in first:
            continue
        inside = set(names)
        given = [f"{name}:{port}" for name in names for port in range(len(graph.whole.ops[name].output_desc))]
        read_outside = [t for t in given if any(r not in inside and r != "NetOutput" for r in graph.whole.readers.get(t, ()))]
        declared = [parsed_shape(graph.declared(tensor)) for tensor in read_outside]
        if all(kind is not None and kind[0].is_floating_point for kind in declared):
            absent |= inside
            drawn += read_outside
    return absent, drawn


def is_int4(op: Any) -> bool:
    """Whether an operator gives int4, which no recording has: it comes with the operators that read it."""
    return bool(op.type == "Bitcast" and read(op).attrs["type"] == INT4)


class StepRecorder:
    """Runs steps of a bucket on the CPU, for all ranks, and keeps every tensor of rank 0.

    Of several calls of one body only the first runs; what the others give is drawn at random, so that a recording takes one layer of each
    kind, however many the model has.

    Args:
        load_params: of a rank.
        state: pools that every rank starts with.
    """

    def __init__(self, graph: BucketGraph, mesh: Mesh, load_params: Callable[[int], LoadParams], state: Sequence[torch.Tensor]) -> None:
        self._graph, self._mesh = graph, mesh
        absent, drawn = _skipped(graph)
        self._drawn = {f"drawn{i}:0": tensor for i, tensor in enumerate(drawn)}
        self._program = GeProgram(self._model(absent))
        self._fed = [f"{op.name}:0" for op in self._program.data]
        self._leaves = {tensor: leaf for tensor, leaf in graph.operand.items() if tensor in self._fed}
        communicates = any(step.group for step in self._program.steps)
        pools = {leaf.name: pool for leaf, pool in zip(graph.signature.state, state, strict=True)}
        self._ranks = [
            {**self._params(load_params(rank)), **{name: pool.clone() for name, pool in pools.items()}}
            for rank in range(mesh.size if communicates else 1)
        ]
        self._constants = {f"{op.name}:0": read(op).attrs["value"] for op in graph.whole.ops.values() if op.type == "Const"}
        self._generator = torch.Generator().manual_seed(0)

    def run(self, step: PlannedStep) -> Values:
        """Every tensor of a step on rank 0 by `name:port`, as it is after the step; int4 tensors are left out."""
        drawn = {name: self._draw(tensor) for name, tensor in self._drawn.items()}
        fed = []
        for rank, memory in enumerate(self._ranks):
            inputs = {**step.tensors[self._mesh.coordinates(rank)["dp"]], COORDS: self._mesh.coords(rank)}
            own = {t: inputs[leaf.path] if leaf.part == "inputs" else memory[leaf.name] for t, leaf in self._leaves.items()}
            fed.append([{**own, **drawn}[tensor] for tensor in self._fed])
        results = self._program.run(fed, MeshExchange(self._mesh))
        for memory, of_rank in zip(self._ranks, results, strict=True):
            self._donate(memory, dict(zip(self._program.results, of_rank, strict=True)))
        first = {self._drawn.get(tensor, tensor): value for tensor, value in zip(self._fed, fed[0], strict=True)}
        return {**self._constants, **first, **dict(zip(self._program.results, results[0], strict=True))}

    def _params(self, load_params: LoadParams) -> Values:
        """The parameters of a rank that the recording reads, and the values that are derived from them."""
        ge_file, leaves = self._graph.whole.ge_file, self._graph.signature.params
        names = {leaf.name for leaf in self._leaves.values() if leaf.part == "params"}
        derived = sorted(int(leaf.path) for leaf in self._leaves.values() if leaf.part == DERIVED)
        of_derived = sources(ge_file) if derived else ()
        names |= {leaves[source].name for number in derived for source in of_derived[number]}
        values: Values = dict(load_params([leaf.name for leaf in leaves if leaf.name in names]))
        computed = evaluate(ge_file, [values.get(leaf.name) for leaf in leaves], derived) if derived else []
        return {**values, **{leaf_name(DERIVED, str(number)): value for number, value in zip(derived, computed, strict=True)}}

    def _donate(self, memory: Mapping[str, torch.Tensor], values: Values) -> None:
        for output, operand in self._graph.whole.ge_file.donations:
            tensor, pool = self._graph.whole.results[output], memory[self._graph.signature.operands[operand].name]
            if tensor in values and values[tensor] is not pool:
                pool.copy_(values[tensor].clone())

    def _draw(self, tensor: str) -> torch.Tensor:
        kind = parsed_shape(self._graph.declared(tensor))
        assert kind is not None
        return torch.randn(kind[1], generator=self._generator).to(kind[0])

    def _model(self, absent: Collection[str]) -> Any:
        """The graph without the operators in `absent`, whose tensors are operands, and with every tensor as a result."""
        remaining = [op for op in self._graph.whole.ops.values() if op.name not in absent and op.type != "NetOutput"]
        read_tensors = {tensor for op in remaining for tensor in op.input}
        renamed = {tensor: name for name, tensor in self._drawn.items()}
        model = messages().ModelDef()
        ops = model.graph.add(name="recording").op
        for name in self._drawn:
            op = ops.add(name=name.removesuffix(":0"), type="Data")
            op.attr["index"].i = len(ops)
            op.output_desc.add(name="y")
        for op in remaining:
            if op.type != "Data" or f"{op.name}:0" in read_tensors:
                new = ops.add()
                new.CopyFrom(op)
                new.input[:] = [renamed.get(t, t) for t in op.input if not t.endswith(":-1") or t.removesuffix(":-1") not in absent]
        output = ops.add(name="NetOutput", type="NetOutput")
        for op in remaining:
            if op.type not in BORDER and not is_int4(op):
                output.input.extend(f"{op.name}:{port}" for port in range(len(op.output_desc)))
        for i in range(len(output.input)):
            output.input_desc.add(name=f"input{i}")
        return model
