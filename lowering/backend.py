"""What every kind of device has in common: the protocol of a backend, and the table of backends by name."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..graphs.errors import LoweringError
from . import backends

if TYPE_CHECKING:
    # Only a build lowers and compiles; a serving process must not load the compilers with this table.
    from ..graphs.spmd.partition import Partitioned
    from .executable import Executable
    from .lower import Lowered


@dataclass(frozen=True)
class Compiled:
    """The last stage: the bytes of one executable.

    Attributes:
        data: what the artifact stores and `Backend.open` reads.
        census: number of operators by type, where the backend counts them.
    """

    data: bytes
    census: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """Where an executable runs.

    Attributes:
        rank: number among all ranks of the mesh.
        groups: communicator name by symbolic group ("dp", "tp", "world"); empty for one device.
        device: torch device of the operands, e.g. "cpu" or "npu:3".
    """

    rank: int = 0
    groups: Mapping[str, str] = field(default_factory=dict)
    device: str = "cpu"


class Backend(Protocol):
    """Takes a partitioned graph to something that runs on one kind of device.

    A file or package in `lowering/backends` exports one as `BACKEND`. Only `name`, `suffix` and `lower` have no default; a backend
    overrides what it cares about.

    Attributes:
        name: as in manifests and on the command line; the name of its file.
        suffix: extension of its executables, without the dot; None where there is nothing to compile.
    """

    name: str
    suffix: str | None

    def lower(self, partitioned: Partitioned) -> Lowered:
        """The graph that this backend runs.

        Raises:
            LoweringError: naming what the backend cannot express.
        """
        ...

    def prepare(self, cache_dir: Path) -> None:
        """Makes this process ready to lower and compile; called before either, with a directory that outlives the process."""
        return

    def compile(self, lowered: Lowered, *, cache_dir: Path, threads: int) -> Compiled:
        """Makes the executable of one lowered graph; equal graphs give equal bytes.

        Args:
            cache_dir: where the compiler keeps what later compiles can use again.
            threads: CPU threads that the code is specialised for; 0 asks the process at run time.

        Raises:
            LoweringError: naming what the backend cannot express, or what its compiler said.
        """
        raise LoweringError(f"backend {self.name} compiles nothing: it reports cost and memory only")

    def prove(self, compiled: Compiled, partitioned: Partitioned) -> None:
        """Proves of an executable what can be proved without running it.

        What runs on this machine is proved by running it beside the reference besides (tools/verify).

        Raises:
            LoweringError: naming the invariant that it breaks.
        """
        return

    def open(self, path: Path, place: Place) -> Executable:
        """Loads what `compile` made; nothing is traced or compiled.

        Raises:
            LoweringError: the file is not this backend's, or cannot run at that place.
        """
        raise LoweringError(f"backend {self.name!r} has no executables: it reports cost and memory only")

    def options(self, threads: int) -> Mapping[str, Any]:
        """What decides the compiled bytes besides graph and toolchain; part of a graph's key."""
        return {}

    def versions(self) -> Mapping[str, str]:
        """Versions of what, besides torch, executables are made with; part of a graph's key and of a manifest's toolchain."""
        return {}

    def cpu_features(self) -> tuple[str, ...]:
        """Features, by the names of `torch.cpu.get_capabilities()`, that code compiled here needs where it runs."""
        return ()

    def compiles_here(self) -> str | None:
        """Why this machine cannot compile for the backend; None where it can."""
        return None

    def runs_here(self) -> str | None:
        """Why this machine cannot run the backend's executables; None where it can."""
        return None


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
    exported = importlib.import_module(f".backends.{name}", __package__).BACKEND
    # By inheritance, not by structure: an object that only looks like a backend would lack the defaults.
    if Backend not in type(exported).__mro__ or exported.name != name:
        raise LoweringError(f"lowering/backends/{name}.py must export BACKEND, a Backend named {name!r}, and exports {exported!r}")
    chosen: Backend = exported
    return chosen
