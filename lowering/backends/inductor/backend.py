"""The inductor backend: compiles lowered graphs to AOTInductor packages (.pt2) for the CPU, and loads them."""

from __future__ import annotations

import hashlib
import io
import json
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import torch

from ....graphs import compile_count
from ....graphs.errors import LoweringError
from ....graphs.step_inputs import kind_of
from ....graphs.types import Bucket
from ... import isa
from ...backend import Backend, CompiledFile, GraphKind, GraphPart, GraphParts
from ...platform import CPU, Platform
from . import unpacking
from .packing import Layout, Packer

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from ....graphs.spmd.partition import PartitionedProgram
    from ...executable import HostExecutable
    from ...lower import LoweredProgram
    from .program import BodyProgram
    from .sizes import CommonGraph, Sizes

NAME = "inductor"
_ROOT = "graph"
_MODEL = "model"
_LAYOUTS, _PACKER = "npucompile/layouts.json", "npucompile/pack.so"
"""Entries of a package whose graph reads packed parameters: their layouts by position, and the library that packs them."""
METADATA = "_metadata.json"
NODES_A_BODY = 120
"""A body compiles for as long as this many nodes more: 2 s of headers and linking, where a node takes 20 ms (decision 048)."""


class PackageExecutable:
    """A loaded package. Loads in milliseconds, compiles nothing.

    Args:
        path: file with a package that `Inductor.compile` returned.

    Raises:
        LoweringError: when torch cannot load it.
    """

    backend = NAME

    def __init__(self, path: Path) -> None:
        try:
            # torch._inductor.aoti_load_package would import the compiler into the serving process.
            self._run = torch._C._aoti.AOTIModelPackageLoader(str(path), _MODEL, False, 1, -1).run
            self._layouts, self._packer = _packing(path)
        except (RuntimeError, OSError) as error:
            said = f"{path} is not a package torch {torch.__version__} can load: {_error_line(error)}"
            raise LoweringError(unpacking.blamed(path, error) or said) from error
        self._packed: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def prepare(self, params: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """Packs the parameters whose layout is not the stored one, unless another package of this process has."""
        if self._packer:
            made = self._packer.pack(params, self._layouts)
            self._packed = [(i, params[i], packed) for i, packed in made.items()]
        return tuple(self._layouts)

    def __call__(self, operands: Sequence[torch.Tensor], /) -> list[torch.Tensor]:
        """Runs one step; state operands are updated in place, the outputs are returned."""
        if self._layouts:
            operands = list(operands)
            if len(self._packed) != len(self._layouts) or any(operands[i] is not plain for i, plain, _ in self._packed):
                self.prepare(operands)
            for i, _, packed in self._packed:
                operands[i] = packed
        return self._run(operands)  # type: ignore[arg-type]  # pybind takes any sequence


def _packing(path: Path) -> tuple[dict[int, Layout], Packer | None]:
    """The layouts of a package's parameters by position, and what packs them."""
    with zipfile.ZipFile(path) as archive:
        if f"{_ROOT}/{_LAYOUTS}" not in archive.namelist():
            return {}, None
        layouts = json.loads(archive.read(f"{_ROOT}/{_LAYOUTS}"))
        return {int(i): Layout(*layout) for i, layout in layouts.items()}, Packer(archive.read(f"{_ROOT}/{_PACKER}"))


def check_operators(graph: GraphModule) -> None:
    """Refuses operators that a package cannot call: all but aten and native ones.

    Raises:
        LoweringError: naming the operators.
    """
    from ....graphs import native_ops

    targets = {node.target for node in graph.graph.nodes if node.op == "call_function"}
    legal = ("aten", "prims", native_ops.NAMESPACE)
    foreign = sorted(str(t) for t in targets if isinstance(t, torch._ops.OpOverload) and t.namespace not in legal)
    if foreign:
        raise LoweringError(f"the inductor backend runs operators of {', '.join(legal)}; this graph also calls {', '.join(foreign)}")


def package(files: Mapping[str, bytes], more: Mapping[str, bytes] | None = None) -> bytes:
    """The package that torch's loader reads: a zip whose bytes depend on the files alone.

    Args:
        files: of the model, by name.
        more: other entries, by path.
    """
    entries: dict[str, bytes] = {"archive_format": b"pt2", "archive_version": b"0", "byteorder": b"little", ".data/version": b"6\n"}
    entries |= {f"data/aotinductor/{_MODEL}/{name}": content for name, content in files.items()}
    entries |= dict(more or {})
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in sorted(entries):
            archive.writestr(zipfile.ZipInfo(f"{_ROOT}/{name}", (1980, 1, 1, 0, 0, 0)), entries[name])
    return buffer.getvalue()


def compiles_sooner_as_one(graph: GraphModule) -> bool:
    """Whether a graph of calls is better one body: its calls together have hardly more nodes than its bodies.

    It then also runs a twentieth faster, as inductor fuses across layers and computes once what several layers compute alike.
    """
    from ....graphs.ir.flatten import bodies

    nodes = {name: len(body.graph.nodes) for name, body in bodies(graph).items()}
    inlined = sum(nodes[str(node.target)] for node in graph.graph.nodes if node.op == "call_module")
    return inlined <= sum(nodes.values()) + NODES_A_BODY * (len(nodes) - 1)


def _check_needs_no_proxy(files: Mapping[str, bytes]) -> None:
    """Refuses a body that calls operators through torch's proxy executor: what runs bodies has none."""
    described = b"".join(content for name, content in files.items() if name.endswith(".json") and not name.endswith(METADATA))
    if described:
        named = sorted(set(re.findall(r'"target": *"([^"]+)"', described.decode(errors="replace"))))
        operators = ", ".join(named) or "an operator that torch does not name"
        raise LoweringError(f"{operators} cannot be called from a body; legal are operators with a C function in torch or of our own")


def _only(files: Mapping[str, bytes], suffix: str) -> bytes:
    (content,) = (content for name, content in files.items() if name.endswith(suffix))
    return content


def _joint(program: BodyProgram, graph: GraphModule) -> bytes:
    """What joins the parts of a graph: the program of its calls, and the layouts of its parameters as JSON, empty where none is packed."""
    from .layouts import layouts

    found = {str(i): layout for i, layout in layouts(graph).items()}
    joint: bytes = msgpack.packb({"program": program.encode(), "layouts": json.dumps(found) if found else ""})
    return joint


def _packing_entries(layouts: str, cache_dir: Path) -> dict[str, bytes]:
    """The entries of a package that say how to pack its parameters; none where it reads all as they are stored."""
    from . import aoti, native

    if not layouts:
        return {}
    library = native.packer(aoti.compiler()[0], aoti.instruction_set() or "native", cache_dir)
    return {_LAYOUTS: layouts.encode(), _PACKER: library.read_bytes()}


def _error_line(error: BaseException) -> str:
    """The line of a long error message that names the error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "error:" in line), lines[0] if lines else "no message")


@dataclass(frozen=True)
class InductorKind:
    """`GraphKind` of graphs that differ in numbers which are made of sizes."""

    common: CommonGraph
    parts: GraphParts

    def holds(self, lowered: LoweredProgram) -> bool:
        """As `GraphKind`."""
        from .sizes import sizes_of

        return self.common.holds(lowered.graph, sizes_of(lowered.bucket, lowered.signature))


class Inductor(Backend):
    """AOTInductor packages for the CPU of this machine; they load without any compiler."""

    name = NAME
    suffix = "pt2"

    def warm(self, cache_dir: Path) -> None:
        """Compiles the kernels, which takes half a minute."""
        from . import aoti, native

        native.archive(aoti.compiler()[0], aoti.instruction_set() or "native", cache_dir.resolve())

    def lower(self, partitioned: PartitionedProgram, platform: Platform = CPU) -> LoweredProgram:
        """Replaces primitives by aten operators and native kernels, in each body once, and gives parameters their layouts; bodies write
        state in place. A graph of few layers becomes one body (`compiles_sooner_as_one`)."""
        from ...lower import lower_bodies, lower_inline
        from .layouts import choose

        lowered = lower_bodies(partitioned, NAME)
        if compiles_sooner_as_one(lowered.graph):
            lowered = lower_inline(partitioned, NAME)
        choose(lowered.graph)
        return lowered

    def parts(self, lowered: LoweredProgram, *, threads: int) -> GraphParts:
        """The bodies that a graph calls, and the program of its calls; a graph without calls is one body.

        Raises:
            LoweringError: naming an operator that a package cannot call.
        """
        return self._parts((lowered,), [{}], threads)

    def samples(self, bucket: Bucket) -> tuple[Bucket, ...]:
        """Two buckets whose graphs tell what in one is a size (sizes.py); none where it is smaller than any size may be."""
        from .sizes import samples

        return () if bucket.q_len < kind_of(bucket).least else samples(bucket)

    def kind(self, samples: Sequence[LoweredProgram], *, threads: int) -> GraphKind:
        """What the graphs of a kind have in common: all but numbers that are made of sizes.

        Raises:
            LoweringError: they differ in more, or as `parts`.
        """
        from .sizes import CommonGraph, sizes_of

        sizes = [sizes_of(lowered.bucket, lowered.signature) for lowered in samples]
        common = CommonGraph.of([lowered.graph for lowered in samples], sizes)
        return InductorKind(common, self._parts(samples, sizes, threads))

    def _parts(self, lowered: Sequence[LoweredProgram], sizes: Sequence[Sizes], threads: int) -> GraphParts:
        """Of one graph, or of one that was lowered for several sizes."""
        from .program import one_call, program_of
        from .sizes import called

        first, graphs = lowered[0], [each.graph for each in lowered]
        names = called(first.graph)
        bodies = {name: [getattr(graph, name) for graph in graphs] for name in names}
        for graph in [body[0] for body in bodies.values()] or [first.graph]:
            check_operators(graph)
        if not names:
            program = one_call(len(first.signature.operands), len(first.signature.outputs))
            return GraphParts((self._part(graphs, sizes, threads),), _joint(program, first.graph))
        parts = {name: self._part(body, sizes, threads) for name, body in bodies.items()}
        different = tuple({part.key: part for part in parts.values()}.values())
        program = program_of(first.graph, {name: different.index(part) for name, part in parts.items()})
        return GraphParts(different, _joint(program, first.graph))

    def _part(self, graphs: Sequence[GraphModule], sizes: Sequence[Sizes], threads: int) -> GraphPart:
        from ...artifact import graph_io

        data = msgpack.packb([[graph_io.encode(graph) for graph in graphs], [sorted(each.items()) for each in sizes]])
        # The options hold the versions of compiler and kernels; of torch, a change of the code that it generates.
        return GraphPart(hashlib.sha256(data + repr((torch.__version__, sorted(self.options(threads).items()))).encode()).hexdigest(), data)

    def compile_part(self, part: GraphPart, *, cache_dir: Path, threads: int) -> bytes:
        """The files of one compiled body.

        Raises:
            LoweringError: quoting the compiler's error, or naming operators that have no C function.
        """
        from ....graphs import ops as ops  # so that the graph's operators are known where it is read back
        from ...artifact import graph_io
        from . import aoti, sizes
        from .parts import CompiledParts, pack_files

        kept = CompiledParts(cache_dir / "bodies")
        if (data := kept.take(part.key)) is not None:
            return data
        aoti.compiler()
        encoded, named = msgpack.unpackb(part.data)
        # Inductor modifies the graph that it compiles, so it gets one of its own.
        graph, operands = sizes.with_values([graph_io.decode(data) for data in encoded], [dict(each) for each in named])
        compile_count.record("compile")
        try:
            files = aoti.compile_files(graph, operands, f"g_{part.key[:16]}", cache_dir=cache_dir.resolve(), threads=threads)
            sizes.check_unguarded(operands)
        except Exception as error:
            raise LoweringError(f"{type(error).__name__}: {_error_line(error)}") from error
        _check_needs_no_proxy(files)
        kept.keep(part.key, data := pack_files(files))
        return data

    def join(self, parts: GraphParts, compiled: Sequence[bytes], *, cache_dir: Path) -> CompiledFile:
        """The package of a graph, which calls its compiled bodies by the program."""
        from . import aoti, native
        from .parts import unpack_files
        from .program import encoded_sizes

        bodies = [unpack_files(data) for data in compiled]
        library = native.stitched(aoti.compiler()[0], cache_dir.resolve())
        libraries, joint = [_only(body, ".so") for body in bodies], msgpack.unpackb(parts.data)
        files = {f"body{i}.bin": content for i, content in enumerate(libraries)}
        files |= {f"stitched{METADATA}": _only(bodies[0], f".wrapper{METADATA}"), "stitched.so": library.read_bytes()}
        files["program.bin"] = joint["program"] + encoded_sizes(libraries)
        return CompiledFile(package(files, _packing_entries(joint["layouts"], cache_dir.resolve())))

    def compile(self, lowered: LoweredProgram, *, cache_dir: Path, threads: int) -> CompiledFile:
        """Compiles a graph of aten and native operators, or of calls of bodies of them, into a package.

        Raises:
            LoweringError: naming an operator that a package cannot call, or quoting the compiler's error.
        """
        parts = self.parts(lowered, threads=threads)
        try:
            compiled = [self.compile_part(part, cache_dir=cache_dir, threads=threads) for part in parts.parts]
        except LoweringError as error:
            raise LoweringError(f"inductor could not compile {lowered.bucket.name}: {error}") from error
        return self.join(parts, compiled, cache_dir=cache_dir)

    def open(self, path: Path) -> HostExecutable:
        """Loads a package."""
        return PackageExecutable(path)

    def options(self, threads: int) -> dict[str, Any]:
        """The settings that decide the bytes of a package, besides graph, torch and machine."""
        from . import aoti, in_place, native, shortcuts, sizes

        return {
            "compiler": aoti.compiler()[1],
            "cpu_features": list(aoti.cpu_features()),
            "instruction_set": isa.in_use(),
            "in_place": in_place.DIGEST,
            "kernels": native.digest(),
            "shortcuts": shortcuts.DIGEST,
            "sizes": sizes.DIGEST,
            "stitched": native.stitched_digest(),
            "threads": threads,
            "wrapper": aoti.WRAPPER_OPT_LEVEL,
        }

    def cpu_features(self) -> tuple[str, ...]:
        """The CPU features of the instruction set that packages are compiled for."""
        from . import aoti

        return aoti.cpu_features()

    def compiles_here(self) -> str | None:
        """Says that a C++ compiler is missing."""
        from . import aoti

        try:
            aoti.compiler()
        except LoweringError as error:
            return str(error)
        return None


BACKEND = Inductor()
