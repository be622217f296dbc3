"""Turns the kernels in cpp/ into an archive that packages are linked with, and their operators into declarations of what it defines."""

from __future__ import annotations

import hashlib
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from ....graphs import native_ops
from ....graphs import ops as ops
from ....graphs.errors import LoweringError

FOLDER = Path(__file__).parents[2] / "cpp"

SHIMS = "shims"
"""The one source that knows torch: without it the kernels are plain C."""

# Arithmetic stays as it is written: no -ffast-math, nor any part of it. A library linked with that makes the whole process flush
# small numbers to zero when it is loaded, and sums in another order would make a row depend on its neighbours.
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Wno-psabi")

_TYPES = {"Tensor": "AtenTensorHandle", "float": "double", "int": "int64_t"}


def sources() -> list[Path]:
    """Every source and header, in order."""
    return sorted(path for path in FOLDER.iterdir() if path.suffix in (".cpp", ".h"))


def digest() -> str:
    """Of the sources and of how they are compiled."""
    texts = [*FLAGS, *(text for path in sources() for text in (path.name, path.read_text(encoding="utf-8")))]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def shims() -> dict[torch._ops.OpOverload, list[str]]:
    """The C function that a package calls for each native operator, as inductor wants it declared."""
    return {native_op.op: [_declaration(native_op.name, native_op.op._schema)] for native_op in native_ops.TABLE.values()}


def _declaration(name: str, schema: torch._C.FunctionSchema) -> str:
    takes = [f"{_TYPES[str(argument.type)]} {argument.name}" for argument in schema.arguments]
    gives = [f"AtenTensorHandle* out{i}" for i in range(len(schema.returns))]
    return f"AOTITorchError aoti_torch_cpu_{name}({', '.join([*takes, *gives])})"


def archive(compiler: str, architecture: str, cache_dir: Path) -> Path:
    """The archive of all kernels; compiled once for each state of the sources, compiler and architecture.

    Args:
        compiler: path of a C++ compiler.
        architecture: as `-march` takes it.
        cache_dir: absolute; keeps it between builds.

    Raises:
        LoweringError: what the compiler said.
    """
    key = hashlib.sha256(f"{digest()} {torch.__version__} {compiler} {architecture}".encode()).hexdigest()[:16]
    library = cache_dir / "native" / f"kernels-{key}.a"
    if library.is_file():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        fresh = Path(scratch) / "kernels.a"
        units = [path for path in sources() if path.suffix == ".cpp"]
        objects = [_compile(unit, compiler, architecture, Path(scratch)) for unit in units]
        _run(["ar", "rcD", str(fresh), *map(str, objects)])
        # Another process may have made the same one meanwhile.
        fresh.replace(library)
    return library


def _compile(unit: Path, compiler: str, architecture: str, to: Path) -> Path:
    include = Path(torch.__file__).parent / "include"
    mapped = [f"-ffile-prefix-map={shlex.quote(str(path))}={name}" for path, name in ((FOLDER, "native"), (include, "torch"))]
    vectors = ["-mprefer-vector-width=512"] if architecture == "x86-64-v4" else []
    object_file = to / f"{unit.stem}.o"
    headers = ["-isystem", str(include)] if unit.stem == SHIMS else []
    _run([compiler, *FLAGS, *headers, f"-march={architecture}", *vectors, *mapped, "-c", str(unit), "-o", str(object_file)])
    return object_file


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise LoweringError(f"the kernels need {command[0]}, which is not here; on Debian: apt-get install g++ binutils") from None
    if done.returncode:
        errors = [line for line in done.stderr.strip().splitlines() if "error" in line] or [done.stderr.strip() or "no message"]
        raise LoweringError(f"{command[0]} could not compile the kernels: {errors[0]}")
