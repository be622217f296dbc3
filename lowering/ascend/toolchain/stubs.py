"""Stub libraries that replace CANN's where there is none: they define every symbol that torch_npu needs, and do nothing.

Conversion to a GE graph never calls CANN, but the loader refuses torch_npu's libraries while symbols are undefined.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

from ....graphs.errors import LoweringError
from .elf import Symbols, read_symbols

INSTALL = "pip install 'npucompile[npu]'"
COMPILERS = ("cc", "gcc", "clang")
PROBED = "libascendcl.so"
_MARK = "npuc_stub"
# Increased when the stubs change, so that the cache of another npucompile version is not used.
_RECIPE = 1


def stub_libraries(cache_dir: Path, ascend_home: str | None = None, compiler: str | None = None) -> list[Path]:
    """Libraries to load before `import torch_npu` where there is no CANN; built on first use, also by several processes at once.

    Args:
        cache_dir: created when missing; gets one directory per torch_npu version and machine.
        ascend_home: where CANN is installed (`ASCEND_HOME_PATH`), or None.
        compiler: a C compiler's path; None looks for one.

    Returns:
        Paths sorted by name; their SONAMEs are those that the wheel's libraries ask for.

    Raises:
        LoweringError: there is a CANN, which stubs would hide, or no torch_npu or no compiler.
    """
    installation = cann(ascend_home)
    if installation is not None:
        raise LoweringError(f"stub libraries would hide the CANN of this machine ({installation}); they are legal only where there is none")
    wheel = wheel_path()
    target = cache_dir / f"ascend-stubs-{_RECIPE}-torch_npu-{importlib.metadata.version('torch_npu')}-{platform.machine()}"
    if not target.exists():
        _build(target, wheel, compiler or find_compiler())
    return sorted(target.glob("*.so"))


def cann(ascend_home: str | None) -> str | None:
    """How CANN was found on this machine, or None; loaded stub libraries do not count."""
    if ascend_home:
        return f"ASCEND_HOME_PATH is {ascend_home}"
    try:
        library = ctypes.CDLL(PROBED)
    except OSError:
        return None
    return None if hasattr(library, _MARK) else f"the loader finds {PROBED}"


def wheel_path() -> Path:
    """Directory of the installed torch_npu, without importing it.

    Raises:
        LoweringError: it is not installed.
    """
    spec = importlib.util.find_spec("torch_npu")
    if spec is None or spec.origin is None:
        raise LoweringError(f"lowering to Ascend needs torch_npu, which is not installed; {INSTALL}")
    return Path(spec.origin).parent


def find_compiler() -> str:
    """Path of a C compiler.

    Raises:
        LoweringError: there is none; names the compilers that were looked for.
    """
    for name in COMPILERS:
        if path := shutil.which(name):
            return path
    raise LoweringError(
        f"stub CANN libraries need a C compiler and none of {', '.join(COMPILERS)} is on PATH; install one (Debian: apt install gcc)"
    )


def missing(wheel: Path) -> tuple[list[str], list[str]]:
    """Symbols and library names that the wheel's libraries need and this machine lacks, both sorted."""
    files = sorted(wheel.rglob("*.so"))
    tables = [read_symbols(path) for path in files]
    return _unresolved(tables), _absent(tables, {path.name for path in files})


def source(symbols: Iterable[str]) -> str:
    """C source that defines every symbol as an alias of one function that returns 0; mangled names are given as assembler names."""
    lines = [f"long {_MARK}(void) {{ return 0; }}"]
    lines += [f'long s{index}(void) __asm__("{name}") __attribute__((alias("{_MARK}")));' for index, name in enumerate(symbols)]
    return "\n".join(lines) + "\n"


def _unresolved(tables: Iterable[Symbols]) -> list[str]:
    """Symbols that neither the wheel, torch, Python nor anything they load defines."""
    tables = list(tables)
    undefined = set().union(*(table.undefined for table in tables)) - set().union(*(table.defined for table in tables))
    # The first handle finds torch's symbols and those of the C and C++ runtimes, the second those of Python.
    loaded = [ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_python.so")), ctypes.CDLL(None)]
    return sorted(name for name in undefined if not any(hasattr(library, name) for library in loaded))


def _absent(tables: Iterable[Symbols], own: set[str]) -> list[str]:
    needed = {name for table in tables for name in table.needed} - own
    needed -= {path.name for path in (Path(torch.__file__).parent / "lib").iterdir()}
    return sorted(name for name in needed if not _loadable(name))


def _loadable(name: str) -> bool:
    try:
        return not hasattr(ctypes.CDLL(name), _MARK)
    except OSError:
        return False


def _build(target: Path, wheel: Path, compiler: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    symbols, libraries = missing(wheel)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        built = Path(scratch) / "built"
        built.mkdir()
        code, shared = Path(scratch) / "stubs.c", Path(scratch) / "stubs.o"
        code.write_text(source(symbols))
        _run([compiler, "-c", "-fPIC", "-O1", "-o", str(shared), str(code)])
        for name in libraries:
            _run([compiler, "-shared", "-nostdlib", f"-Wl,-soname,{name}", "-o", str(built / name), str(shared)])
        try:
            built.rename(target)
        except OSError:
            # Another process was faster; its directory is complete too, as directories are renamed into place whole.
            if not target.is_dir():
                raise


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise LoweringError(
            f"{command[0]} cannot compile stub CANN libraries (exit code {result.returncode}): {result.stderr.strip()[-2000:]}"
        )
