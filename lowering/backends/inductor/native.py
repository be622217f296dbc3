"""The C++ kernels of the CPU backend: the archive that packages are linked with, and the C declarations of its functions."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from ....graphs import native_ops
from ....graphs import ops as ops
from ....graphs.errors import LoweringError
from ... import isa

FOLDER = Path(__file__).parents[2] / "cpp"

SHIMS = "shims"
"""The only source that includes torch's headers."""

# Neither -ffast-math nor any part of it: a library linked with it makes the whole process flush denormals to zero when it is loaded,
# and reordered sums would make a row's result depend on the rows beside it.
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Wno-psabi")
SHIMS_FLAGS = ("-O1",)
"""Of `SHIMS`, which computes nothing: it compiles in a third of the time."""

STITCHED = FOLDER / "stitched" / "stitched.cpp"
BODY, PREFIX = FOLDER / "stitched" / "body.h", FOLDER / "stitched" / "prefix.h"
"""What generated code exports for the library of `stitched`, and what it includes first, precompiled."""
STITCHED_FLAGS = ("-O2", "-std=c++17", "-fPIC", "-shared", "-s", "-fvisibility=hidden")

_TYPES = {"Tensor": "AtenTensorHandle", "float": "double", "int": "int64_t"}


def sources() -> list[Path]:
    """Every source and header, in order."""
    return sorted(path for path in FOLDER.iterdir() if path.suffix in (".cpp", ".h"))


def digest() -> str:
    """Digest of the sources and the compiler flags."""
    parts = [*FLAGS, *SHIMS_FLAGS, *(text for path in sources() for text in (path.name, path.read_text(encoding="utf-8")))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def variants() -> tuple[str, ...]:
    """Flags that leave out of kernels the variants beyond a level (lowering/cpp/cpu.h) that none here may use: half of the seconds."""
    return () if isa.has("avx512_bf16") else ("-DWIDE_ALONE",)


def shims() -> dict[torch._ops.OpOverload, list[str]]:
    """Operator -> declaration of the C function that a package calls for it, in inductor's form."""
    return {native.op: [_declaration(native.name, native.op._schema)] for native in native_ops.TABLE.values()}


def _declaration(name: str, schema: torch._C.FunctionSchema) -> str:
    takes = [f"{_TYPES[str(argument.type)]} {argument.name}" for argument in schema.arguments]
    gives = [f"AtenTensorHandle* out{i}" for i in range(len(schema.returns))]
    return f"AOTITorchError aoti_torch_cpu_{name}({', '.join([*takes, *gives])})"


def archive(compiler: str, architecture: str, cache_dir: Path) -> Path:
    """The archive of all kernels; compiled again only when the sources, the compiler or the architecture change.

    Processes that need it at the same time share the sources between them.

    Args:
        compiler: path of a C++ compiler.
        architecture: value of `-march`.
        cache_dir: absolute; keeps the archive between builds.

    Raises:
        LoweringError: quoting the compiler's error.
    """
    left_out = variants()
    key = hashlib.sha256(f"{digest()} {torch.__version__} {compiler} {architecture} {left_out}".encode()).hexdigest()[:16]
    target = cache_dir / "native" / f"kernels-{key}.a"
    if target.is_file():
        return target
    shared_by_all = target.with_suffix(".objects")
    shared_by_all.mkdir(parents=True, exist_ok=True)
    units = [path for path in sources() if path.suffix == ".cpp"]
    # The slowest first, so that nobody waits for it in the end: torch's headers are most of all that is compiled.
    units.sort(key=lambda unit: unit.stem != SHIMS)
    try:
        for wait in (False, True):
            for unit in units:
                with _turn(shared_by_all / f"{unit.stem}.lock", wait) as mine:
                    # In this order: objects are removed when the archive is there.
                    if mine and not (shared_by_all / f"{unit.stem}.o").exists() and not target.is_file():
                        # Renamed when it is whole: a compiler that is killed leaves a part.
                        with tempfile.TemporaryDirectory(dir=shared_by_all) as scratch:
                            made = _compile(unit, compiler, architecture, Path(scratch), *left_out)
                            made.replace(shared_by_all / made.name)
        if not target.is_file():
            with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
                library = Path(scratch) / "kernels.a"
                _run(["ar", "rcD", str(library), *(str(shared_by_all / f"{unit.stem}.o") for unit in units)])
                # Atomic, because another process may do the same at the same time.
                library.replace(target)
    except (LoweringError, FileNotFoundError) as error:
        # Another process may have made it and removed the objects meanwhile; or it failed, and this one finds its folder gone.
        if not target.is_file():
            raise error if isinstance(error, LoweringError) else LoweringError("another process could not compile the kernels") from error
    finally:
        shutil.rmtree(shared_by_all, ignore_errors=True)
    return target


@contextmanager
def _turn(lock: Path, wait: bool) -> Iterator[bool]:
    """Whether this process has the lock, or may not have it now; the system takes it from a process that ends."""
    try:
        handle = os.open(lock, os.O_CREAT | os.O_RDWR)
    except FileNotFoundError:
        yield False
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(handle)


def shared(compiler: str, architecture: str, cache_dir: Path) -> Path:
    """A shared library of all kernels, whose functions are called without torch, to measure them.

    Raises:
        LoweringError: quoting the compiler's error.
    """

    def make(library: Path) -> None:
        units = [path for path in sources() if path.suffix == ".cpp" and path.stem != SHIMS]
        objects = [_compile(unit, compiler, architecture, library.parent, "-fvisibility=default") for unit in units]
        _run([compiler, "-shared", "-fopenmp", *map(str, objects), "-o", str(library)])

    return _kept(cache_dir, "kernels", f"{digest()} {compiler} {architecture}", make)


def packer(compiler: str, architecture: str, cache_dir: Path) -> Path:
    """A shared library of the functions that pack parameters, which loaders call without torch; equal bytes for equal sources.

    Raises:
        LoweringError: quoting the compiler's error.
    """

    def make(library: Path) -> None:
        unit = _compile(FOLDER / "pack.cpp", compiler, architecture, library.parent, "-fvisibility=default")
        _run([compiler, "-shared", "-fopenmp", "-s", "-Wl,--build-id=none", str(unit), "-o", str(library)])

    return _kept(cache_dir, "pack", f"{digest()} {compiler} {architecture}", make)


def stitched(compiler: str, cache_dir: Path) -> Path:
    """The library that calls the bodies of a package (lowering/cpp/stitched); compiled again only when it, the compiler or torch change.

    Raises:
        LoweringError: quoting the compiler's error.
    """
    root = Path(torch.__file__).parent

    def make(library: Path) -> None:
        mapped = [f"-ffile-prefix-map={path}={name}" for path, name in ((STITCHED.parent, "native"), (root / "include", "torch"))]
        files = ["-isystem", str(root / "include"), str(STITCHED), "-o", str(library), f"-L{root / 'lib'}", "-ltorch_cpu"]
        _run([compiler, *STITCHED_FLAGS, *mapped, *files])

    return _kept(cache_dir, "stitched", f"{stitched_digest()} {torch.__version__} {compiler}", make)


def stitched_digest() -> str:
    """Digest of the sources and the flags of `stitched`, and of what bodies export for it."""
    texts = (path.read_text(encoding="utf-8") for path in (STITCHED, BODY))
    return hashlib.sha256("\0".join((*STITCHED_FLAGS, *texts)).encode()).hexdigest()


def _kept(cache_dir: Path, name: str, key: str, make: Callable[[Path], None]) -> Path:
    """A library that is made when there is none of its key."""
    target = cache_dir / "native" / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        library = Path(scratch) / f"{name}.so"
        make(library)
        # Atomic, as above.
        library.replace(target)
    return target


def _compile(unit: Path, compiler: str, architecture: str, to: Path, *more: str) -> Path:
    include = Path(torch.__file__).parent / "include"
    mapped = [f"-ffile-prefix-map={shlex.quote(str(path))}={name}" for path, name in ((FOLDER, "native"), (include, "torch"))]
    vectors = ["-mprefer-vector-width=512"] if architecture == "x86-64-v4" else []
    output = to / f"{unit.stem}.o"
    own = [*SHIMS_FLAGS, "-isystem", str(include)] if unit.stem == SHIMS else []
    _run([compiler, *FLAGS, *own, f"-march={architecture}", *vectors, *mapped, *more, "-c", str(unit), "-o", str(output)])
    return output


def _run(command: Sequence[str]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise LoweringError(f"the kernels need {command[0]}, which is not here; on Debian: apt-get install g++ binutils") from None
    if result.returncode:
        errors = [line for line in result.stderr.strip().splitlines() if "error" in line] or [result.stderr.strip() or "no message"]
        raise LoweringError(f"{command[0]} could not compile the kernels: {errors[0]}")
