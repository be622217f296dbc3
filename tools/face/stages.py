"""The stages of a pure function: traced, partitioned, lowered and compiled, each of which becomes the next."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NoReturn

import torch
from torch.fx import GraphModule

from ...graphs import stage
from ...graphs.cost import Memory
from ...graphs.errors import GraphError, LoweringError, SpecError
from ...graphs.ir import trace as tracing
from ...graphs.passes.optimise import optimise
from ...graphs.primitive import Cost
from ...graphs.spmd import partition as partitioning
from ...graphs.text import as_text
from ...graphs.types import Mesh, Rules, Tree
from ...lowering import backend as backends
from ...lowering import lower as lowering
from ...lowering.ascend.cost.estimate import StepCost, estimate
from ...lowering.ascend.cost.parameters import parameters
from ...lowering.ascend.emulator.interpreter import Interpreter
from ...lowering.ascend.shipped import ENCODINGS, ShippedGraph
from ...lowering.device import NPU, missing
from ...lowering.executable import HostExecutable
from ...lowering.platform import Platform
from ..builder.pool import THREADS
from ..builder.targets import TARGETS, Target
from ..builder.targets import target as target_named
from ..cli import home_of_process
from ..progress import Progress, quiet_torch
from .calls import FunctionCall, shares, whole
from .device_call import DeviceCall

DEVICE = NPU
"""The kind of device that runs what is compiled for NPUs."""


def trace(function: Callable[..., Tree], /, *avals: Tree) -> Traced:
    """Records a pure function over trees of tensors; nothing is computed or allocated.

    Args:
        function: returns a tree of tensors, and reads nothing but its arguments.
        avals: of its positional arguments: a tree of `Aval`s each, or of tensors, whose shapes and dtypes are taken.

    Raises:
        SpecError: the avals are none of this function's arguments.
        GraphError: it returns something else than tensors.
    """
    call = FunctionCall.of(function, avals)
    try:
        return Traced(call, tracing.trace(call.program()))
    except RuntimeError as error:
        if isinstance(error, NotImplementedError) or "meta tensors" not in str(error):
            raise
        raise GraphError(f"{call.name}: {error}: it reads a value; legal is what shapes alone decide") from error


@dataclass(frozen=True, repr=False)
class _Stage:
    """What all stages say of themselves."""

    call: FunctionCall
    graph: stage.Stage

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.graph.title}>"

    def as_text(self) -> str:
        """The graph, a line an operator: the same function gives the same lines."""
        return self.graph.as_text()

    def cost(self) -> Cost:
        """Operations of one call, and bytes that it reads and writes; of one rank where there are several."""
        return self.graph.cost()

    def memory(self) -> Memory:
        """Bytes that one call needs; of one rank where there are several."""
        return self.graph.memory()


@dataclass(frozen=True, repr=False)
class _NotCompiled(_Stage):
    def __call__(self, *arguments: Tree) -> NoReturn:
        """Refuses a call."""
        stage_name = type(self).__name__.lower()
        legal = "what .partition(mesh, rules).lower(target).compile() returns"
        raise SpecError(f"{self.call.name} is {stage_name} and not compiled; legal is to call {legal}")


@dataclass(frozen=True, repr=False)
class Traced(_NotCompiled):
    """A function as a graph over whole shapes."""

    graph: tracing.TracedProgram

    def partition(
        self, mesh: Mesh | Mapping[str, int] | str = "", rules: Rules | Mapping[str, str | tuple[str, ...]] | None = None
    ) -> Partitioned:
        """Splits the function over a mesh; without one it stays on one device.

        Args:
            mesh: the size of each axis by its name, as {"x": 2, "y": 4}, or as text "x=2,y=4".
            rules: by the names that avals give their dimensions: the axis or axes of the mesh that they are split over.

        Raises:
            SpecError: the mesh is none, or a rule names an axis that it does not have.
            PartitionError: a size does not divide, or an operator would move data that no `constrain` asks for.
        """
        chosen = _mesh(mesh)
        layout, call = _rules(rules or {}, chosen), self.call
        if chosen.size == 1:
            return Partitioned(call, optimise(partitioning.partition(self.graph, chosen, layout)))
        # It is traced again, and may return another tree.
        call = replace(call, returned=[])
        return Partitioned(call, optimise(partitioning.partition(call.program(), chosen, layout)))


@dataclass(frozen=True, repr=False)
class Partitioned(_NotCompiled):
    """The graph of one rank of a mesh, the same for all: local shapes, explicit collectives, and all passes done."""

    graph: partitioning.PartitionedProgram

    @property
    def collectives(self) -> tuple[tuple[str, str, str], ...]:
        """(collective, group, type) of every communication in order."""
        return self.graph.collectives

    def lower(
        self, target: str = "cpu", *, backend: str | None = None, cann: str | None = None, operator_packages: tuple[str, ...] = ()
    ) -> Lowered:
        """Replaces operators by those of a target.

        Args:
            target: "cpu" for this machine, "ascend-a2" or "ascend-a3".
            backend: what compiles; the target's own by default.
            cann: release of CANN, on targets that are NPUs.
            operator_packages: that are installed beside it.

        Raises:
            SpecError: there is no such target or release, or the target has no such backend, or fewer devices than the mesh.
            LoweringError: naming the operator that the target lacks, or what this machine lacks to build for it.
        """
        place, mesh = target_named(target), self.graph.mesh
        name = backend or place.default_backend(mesh)
        legal = [each for each in place.backends if each != "inductor" or mesh.size == 1]
        if name not in legal:
            raise SpecError(f"backend {name!r} does not build for {target} and mesh {mesh}; legal are {', '.join(legal)}")
        if mesh.size > place.max_npus:
            raise SpecError(f"mesh {mesh} has {mesh.size} ranks and {target} at most {place.max_npus}")
        if place.npu is None and (cann or operator_packages):
            raise SpecError(f"cann is {cann!r} and operator_packages {operator_packages} for {target}; legal is neither: it is no NPU")
        chosen = backends.backend(name)
        if reason := chosen.compiles_here():
            raise LoweringError(reason)
        platform = Platform(place.chip, cann or place.cann, tuple(sorted(operator_packages)))
        with quiet_torch():
            chosen.prepare(_cache())
            return Lowered(self.call, chosen.lower(self.graph, platform), self.graph, place)


@dataclass(frozen=True, repr=False)
class Lowered(_NotCompiled):
    """The graph in the operators of a target."""

    graph: lowering.LoweredProgram
    partitioned: partitioning.PartitionedProgram
    target: Target

    def compile(self, *, progress: bool = True) -> Compiled:
        """Compiles the graph, and checks of it what can be checked without running it.

        Args:
            progress: whether standard error shows how far it is. The first compile for a CPU takes a minute.

        Raises:
            LoweringError: naming what cannot be compiled, or what the target refuses.
        """
        chosen, cache = backends.backend(self.graph.backend), _cache()
        with quiet_torch():
            chosen.prepare(cache)
            compiled = _compiled(chosen, self.graph, cache, Progress(quiet=not progress))
            chosen.prove(compiled, self.partitioned, self.graph.platform)
        return Compiled(self.call, self.graph, self.partitioned, self.target, compiled.data)


@dataclass(frozen=True, repr=False)
class Compiled(_Stage):
    """A compiled function: called with trees of tensors, it returns a tree of tensors.

    Attributes:
        data: bytes of the executable.
    """

    graph: lowering.LoweredProgram
    partitioned: partitioning.PartitionedProgram
    target: Target
    data: bytes

    def as_text(self) -> str:
        """On NPUs the graph that is shipped; else the lowered one, of which the executable is machine code."""
        title = f"{self.call.name} compiled for {self.target.name}"
        if (encoding := ENCODINGS.get(self.graph.backend)) is not None:
            return f"{title}\n{encoding.text(self._shipped)}"
        return as_text(self.graph.graph, title)

    def __call__(self, *arguments: Tree) -> Tree:
        """Runs the function on this machine: on its CPU, or on its first NPU.

        Raises:
            SpecError: the arguments are not those that it was traced for, it was compiled for several ranks, or there is no NPU here.
        """
        mesh, what = self.partitioned.mesh, f"{self.call.name} is compiled for {self.target.name}"
        if mesh.size > 1:
            raise SpecError(f"{what} and the {mesh.size} ranks of mesh {mesh}; one process runs one rank, and .emulate(...) runs all here")
        operands = self.call.operands(arguments)
        if self.target.local:
            return self.call.result(self._executable(operands))
        if reason := missing(DEVICE):
            raise SpecError(f"{what}, and this machine cannot run it: {reason}; .emulate(...) runs it on the CPU")
        return self.call.result(self._on_device(operands))

    def emulate(self, *arguments: Tree) -> Tree:
        """Runs all ranks in this process: what is shipped, operator by operator, with kernels of the CPU. It takes whole values and
        returns whole values.

        For a CPU the lowered graph is run so, not the machine code.

        Raises:
            SpecError: the arguments are not those that the function was traced for.
            LoweringError: an operator is not implemented here.
            VerifyError: ranks disagree on what they both have.
        """
        operands, parts = self.call.operands(arguments), self.partitioned
        avals = [leaf.aval for leaf in tracing.signature_of(parts.program).operands]
        with torch.no_grad():
            results = self._interpreter(shares(operands, avals, parts.mesh, parts.rules))
        outputs = enumerate(parts.signature.outputs)
        return self.call.result([whole(leaf, [result[i] for result in results], parts.mesh, parts.rules) for i, leaf in outputs])

    def estimate(self) -> StepCost:
        """The time of one call on the busiest rank of an NPU target, in all and by cause. Nothing of it was measured here.

        Raises:
            SpecError: the target is a CPU.
            LoweringError: nothing is known of an operator.
        """
        if self.graph.backend not in ENCODINGS:
            npus = ", ".join(name for name in TARGETS if not target_named(name).local)
            raise SpecError(f"{self.call.name} is compiled for {self.target.name} by {self.graph.backend}; times are estimated for {npus}")
        return estimate(self._shipped, parameters(self.target.chip), self.partitioned.mesh, 0, self.graph.platform)

    @cached_property
    def _shipped(self) -> ShippedGraph:
        return ENCODINGS[self.graph.backend].decode(self.data)

    @cached_property
    def _interpreter(self) -> Interpreter:
        graph: ShippedGraph | GraphModule = self._shipped if self.graph.backend in ENCODINGS else self.graph.graph
        return Interpreter(graph, self.partitioned.mesh)

    @cached_property
    def _on_device(self) -> DeviceCall:
        suffix, packages = str(backends.backend(self.graph.backend).suffix), self.graph.platform.packages
        return DeviceCall(DEVICE, self.data, suffix, self.partitioned.signature, packages)

    @cached_property
    def _executable(self) -> HostExecutable:
        with tempfile.TemporaryDirectory(prefix="npucompile-") as directory:
            file = Path(directory) / f"function.{backends.backend(self.graph.backend).suffix}"
            file.write_bytes(self.data)
            return backends.open_executable(file, self.graph.backend)


def _compiled(chosen: backends.Backend, lowered: lowering.LoweredProgram, cache: Path, progress: Progress) -> backends.CompiledFile:
    """Compiles a graph, part by part where the backend knows parts."""
    parts = chosen.parts(lowered, threads=THREADS) if chosen.suffix else None
    with progress.bar(f"compile {lowered.bucket.name} ({chosen.name})", len(parts.parts) if parts else 1) as bar:
        if parts is None:
            compiled = chosen.compile(lowered, cache_dir=cache, threads=THREADS)
            bar.step("graph")
            return compiled
        bodies = []
        for number, part in enumerate(parts.parts):
            bodies.append(chosen.compile_part(part, cache_dir=cache, threads=THREADS))
            bar.step(f"body {number}")
        return chosen.join(parts, bodies, cache_dir=cache)


def _cache() -> Path:
    cache = home_of_process().cache
    cache.mkdir(parents=True, exist_ok=True)
    return cache


def _mesh(mesh: Mesh | Mapping[str, int] | str) -> Mesh:
    if isinstance(mesh, Mapping):
        mesh = ",".join(f"{name}={size}" for name, size in mesh.items())
    return Mesh.parse(mesh) if isinstance(mesh, str) else Mesh.parse(str(mesh))


def _rules(rules: Rules | Mapping[str, str | tuple[str, ...]], mesh: Mesh) -> Rules:
    """The rules, all of whose axes are the mesh's."""
    chosen = rules if isinstance(rules, Rules) else Rules.of(rules)
    own = [name for name, _ in mesh.axes]
    for logical, names in chosen.table:
        if strange := [name for name in names if name not in own]:
            legal = f"legal are {', '.join(own)}" if own else "legal are none"
            raise SpecError(f"rule {logical!r} -> {', '.join(map(repr, strange))}: mesh {mesh} has no such axis; {legal}")
    return chosen
