"""Turns a torch_npu wheel into shared libraries that stand in for CANN's: every symbol there, none does anything.

Conversion to a GE graph never calls CANN, but torch_npu's libraries cannot be loaded without the symbols they name.
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
# Raised when what is written here changes, so that a cache of an older npucompile is not taken for a newer one's.
_RECIPE = 1


def stub_libraries(cache_dir: Path, ascend_home: str | None = None, compiler: str | None = None) -> list[Path]:
    """Libraries to load before `import torch_npu` where there is no CANN; made on first use, safe against other processes.

    Args:
        cache_dir: made when missing; one directory per torch_npu version and machine goes in it.
        ascend_home: where CANN is installed, as its own set-up script says it, or None.
        compiler: a C compiler's path; None looks for one.

    Returns:
        Paths in the order of their names; their SONAMEs are those the wheel asks for.

    Raises:
        LoweringError: CANN is there (stubs would hide it), or torch_npu or a compiler is not.
    """
    found = cann(ascend_home)
    if found is not None:
        raise LoweringError(f"stub libraries would hide the CANN of this machine ({found}); they are legal only where there is none")
    wheel = wheel_path()
    target = cache_dir / f"ascend-stubs-{_RECIPE}-torch_npu-{importlib.metadata.version('torch_npu')}-{platform.machine()}"
    if not target.exists():
        _make(target, wheel, compiler or find_compiler())
    return sorted(target.glob("*.so"))


def cann(ascend_home: str | None) -> str | None:
    """What says that CANN is on this machine, or None; our own stubs, once loaded, do not count."""
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
        LoweringError: there is none; names what was looked for.
    """
    for name in COMPILERS:
        if path := shutil.which(name):
            return path
    raise LoweringError(
        f"stub CANN libraries need a C compiler and none of {', '.join(COMPILERS)} is on PATH; install one (Debian: apt install gcc)"
    )


def missing(wheel: Path) -> tuple[list[str], list[str]]:
    """What the wheel's libraries need and this machine lacks: symbols, sorted, and library names, sorted."""
    files = sorted(wheel.rglob("*.so"))
    tables = [read_symbols(path) for path in files]
    return _unresolved(tables), _absent(tables, {path.name for path in files})


def source(symbols: Iterable[str]) -> str:
    """C source in which every symbol is one function that returns 0; mangled names go in as assembler names."""
    lines = [f"long {_MARK}(void) {{ return 0; }}"]
    lines += [f'long s{index}(void) __asm__("{name}") __attribute__((alias("{_MARK}")));' for index, name in enumerate(symbols)]
    return "\n".join(lines) + "\n"


def _unresolved(tables: Iterable[Symbols]) -> list[str]:
    """A name that torch, Python or what they load defines is real; one that only CANN could define is not there."""
    tables = list(tables)
    wanted = set().union(*(table.undefined for table in tables)) - set().union(*(table.defined for table in tables))
    # The second handle sees Python itself; the first sees torch and, through it, the C and C++ runtimes.
    known = [ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_python.so")), ctypes.CDLL(None)]
    return sorted(name for name in wanted if not any(hasattr(library, name) for library in known))


def _absent(tables: Iterable[Symbols], own: set[str]) -> list[str]:
    wanted = {name for table in tables for name in table.needed} - own
    wanted -= {path.name for path in (Path(torch.__file__).parent / "lib").iterdir()}
    return sorted(name for name in wanted if not _loadable(name))


def _loadable(name: str) -> bool:
    try:
        return not hasattr(ctypes.CDLL(name), _MARK)
    except OSError:
        return False


def _make(target: Path, wheel: Path, compiler: str) -> None:
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
            # Another process was faster; what it renamed into place is complete, as ours would be.
            if not target.is_dir():
                raise


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LoweringError(f"{command[0]} cannot make stub CANN libraries (exit code {done.returncode}): {done.stderr.strip()[-2000:]}")
