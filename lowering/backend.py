"""Turns the name of a backend into the record of what it does: lower, compile, load."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..graphs.errors import LoweringError
from . import backends

if TYPE_CHECKING:
    # Only a build lowers and compiles; a serving process must not load the compilers with this table.
    from torch.fx import GraphModule

    from ..graphs.spmd.partition import Partitioned
    from ..graphs.types import Signature
    from .executable import Executable
    from .lower import Lowered


class Compile(Protocol):
    """Makes one executable file of one lowered graph."""

    def __call__(self, graph: GraphModule, signature: Signature, out_path: Path, *, cache_dir: Path, threads: int) -> None:
        """Compiles `graph` (`Lowered.graph`) into `out_path`.

        Args:
            graph: flat, placeholders in the order of `signature.operands`, state written in place.
            signature: its calling convention.
            out_path: file to write, with the backend's suffix; its directory exists.
            cache_dir: where the compiler keeps what the next compile can use again.
            threads: CPU threads the code is specialised for; 0 asks the process at run time.

        Raises:
            LoweringError: naming what the backend cannot express or what its compiler said.
        """


@dataclass(frozen=True)
class Backend:
    """What one backend can do. A file in `lowering/backends` exports one as `BACKEND`.

    Attributes:
        name: as in manifests and on the command line; the file's name.
        suffix: extension of its files, without the dot.
        lower: partitioned graph to the graph this backend runs.
        options: what decides the compiled bytes besides graph and toolchain, given `threads`; part of a graph's key.
        cpu_features: features of `torch.cpu.get_capabilities()` that its code uses on the machine it compiles for.
        check_target: raises LoweringError when this machine cannot compile for the backend, saying what is missing.
        compile: makes an executable file; None where there is nothing to compile.
        load: reads that file; None where there is nothing to run.
        prepare: makes a process ready to lower and compile, given a directory that outlives it; called once, before either.
    """

    name: str
    suffix: str
    lower: Callable[[Partitioned], Lowered]
    options: Callable[[int], Mapping[str, Any]]
    cpu_features: Callable[[], tuple[str, ...]]
    check_target: Callable[[], None]
    compile: Compile | None
    load: Callable[[Path], Executable] | None
    prepare: Callable[[Path], None] = lambda cache_dir: None


def backend_names() -> tuple[str, ...]:
    """Names of all backends, in alphabetical order; no backend is imported."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(backends.__path__)))


def backend(name: str) -> Backend:
    """The backend of that name; only its own file is imported.

    Raises:
        LoweringError: when there is none, saying which there are.
    """
    if name not in backend_names():
        raise LoweringError(f"no backend {name!r}; legal are {', '.join(backend_names())}")
    found = importlib.import_module(f".backends.{name}", __package__).BACKEND
    if not isinstance(found, Backend) or found.name != name:
        raise LoweringError(f"lowering/backends/{name}.py must export BACKEND, a Backend named {name!r}, and exports {found!r}")
    return found
