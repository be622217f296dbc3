"""The inductor backend: compiles lowered graphs to AOTInductor packages (.pt2) for the CPU, and loads them."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ....graphs import compile_count
from ....graphs.errors import LoweringError
from ...backend import Backend, Compiled
from ...platform import CPU, Platform
from .packing import Layout, Packer

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from ....graphs.spmd.partition import Partitioned
    from ...executable import Executable
    from ...lower import Lowered

NAME = "inductor"
_ROOT = "graph"
_MODEL = "model"
_LAYOUTS, _PACKER = "npucompile/layouts.json", "npucompile/pack.so"
"""Entries of a package whose graph reads packed parameters: their layouts by position, and the library that packs them."""


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
        except RuntimeError as error:
            raise LoweringError(f"{path} is not a package torch {torch.__version__} can load: {_error_line(error)}") from error
        self._layouts, self._packer = _packing(path)
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


def _error_line(error: BaseException) -> str:
    """The line of a long error message that names the error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "error:" in line), lines[0] if lines else "no message")


class Inductor(Backend):
    """AOTInductor packages for the CPU of this machine; they load without any compiler."""

    name = NAME
    suffix = "pt2"

    def lower(self, partitioned: Partitioned, platform: Platform = CPU) -> Lowered:
        """Replaces primitives by aten operators and native kernels; state is written in place, and parameters get their layouts."""
        from ...lower import lower_inline
        from .layouts import choose

        lowered = lower_inline(partitioned, NAME)
        choose(lowered.graph)
        return lowered

    def compile(self, lowered: Lowered, *, cache_dir: Path, threads: int) -> Compiled:
        """Compiles a graph of aten and native operators into a package.

        Raises:
            LoweringError: naming an operator that a package cannot call, or quoting the compiler's error.
        """
        from torch._subclasses.fake_tensor import FakeTensorMode

        from ....graphs import ops as ops  # so that the graph's operators are known where it is read back
        from ...artifact import graph_io
        from . import aoti

        check_operators(lowered.graph)
        aoti.compiler()
        with FakeTensorMode():
            operands = [torch.empty(leaf.aval.shape, dtype=leaf.aval.dtype) for leaf in lowered.signature.operands]
        data = graph_io.encode(lowered.graph)
        name = hashlib.sha256(data + repr(sorted(self.options(threads).items())).encode()).hexdigest()[:16]
        # Inductor modifies the graph that it compiles, so it gets a copy; it would take recorded values for its operands, so these go.
        copy = graph_io.decode(data)
        for node in copy.graph.nodes:
            node.meta.clear()
        compile_count.record("compile")
        try:
            files = aoti.compile_files(copy, operands, f"g_{name}", cache_dir=cache_dir.resolve(), threads=threads)
        except Exception as error:
            raise LoweringError(
                f"inductor could not compile {lowered.bucket.name}: {type(error).__name__}: {_error_line(error)}"
            ) from error
        return Compiled(package(files, self._packing(lowered.graph, cache_dir.resolve())))

    def _packing(self, graph: GraphModule, cache_dir: Path) -> dict[str, bytes]:
        """The entries of a package that say how to pack its parameters; none where it reads all as they are stored."""
        from . import aoti, native
        from .layouts import layouts

        found = layouts(graph)
        if not found:
            return {}
        library = native.packer(aoti.compiler()[0], aoti.instruction_set() or "native", cache_dir)
        return {_LAYOUTS: json.dumps({str(i): layout for i, layout in found.items()}).encode(), _PACKER: library}

    def open(self, path: Path) -> Executable:
        """Loads a package."""
        return PackageExecutable(path)

    def options(self, threads: int) -> dict[str, Any]:
        """The settings that decide the bytes of a package, besides graph, torch and machine."""
        from . import aoti, in_place, native

        return {
            "compiler": aoti.compiler()[1],
            "cpu_features": list(aoti.cpu_features()),
            "instruction_set": aoti.instruction_set(),
            "in_place": in_place.DIGEST,
            "kernels": native.digest(),
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
