"""The inductor backend: compiles lowered graphs to AOTInductor packages (.pt2) for the CPU, and loads them."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ....graphs import compile_count
from ....graphs.errors import LoweringError
from ...backend import Backend, Compiled
from ...platform import CPU, Platform

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from ....graphs.spmd.partition import Partitioned
    from ...executable import Executable
    from ...lower import Lowered

NAME = "inductor"
_ROOT = "graph"
_MODEL = "model"


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

    def __call__(self, operands: Sequence[torch.Tensor], /) -> list[torch.Tensor]:
        """Runs one step; state operands are updated in place, the outputs are returned."""
        return self._run(operands)  # type: ignore[arg-type]  # pybind takes any sequence


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


def package(files: Mapping[str, bytes]) -> bytes:
    """The package that torch's loader reads: a zip whose bytes depend on the files alone."""
    entries = {"archive_format": b"pt2", "archive_version": b"0", "byteorder": b"little", ".data/version": b"6\n"}
    entries |= {f"data/aotinductor/{_MODEL}/{name}": content for name, content in files.items()}
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
        """Replaces primitives by aten operators and native kernels; state is written in place."""
        from ...lower import lower_inline

        return lower_inline(partitioned, NAME)

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
        return Compiled(package(files))

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
