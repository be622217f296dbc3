"""The protocol of a backend, and the table of backends by name."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..graphs.errors import LoweringError
from ..graphs.types import Bucket, Signature
from . import backends
from .executable import HostExecutable
from .platform import CPU, Platform

if TYPE_CHECKING:
    # A serving process imports this file and must not load the partitioner; only a build lowers and compiles.
    from ..graphs.spmd.partition import PartitionedProgram
    from .lower import LoweredProgram


@dataclass(frozen=True)
class CompiledFile:
    """The last stage: the bytes of one executable.

    Attributes:
        data: content of the file that the artifact stores and `Backend.open` reads.
        census: number of operators by type, where the backend counts them.
    """

    data: bytes
    census: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Claims:
    """What a partitioned graph says of itself, and its executable is proved to keep.

    Attributes:
        collectives: as `PartitionedProgram.collectives`.
    """

    signature: Signature
    collectives: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class GraphPart:
    """A part of a lowered graph that is compiled by itself, as data that another process can be sent.

    Attributes:
        key: digest of everything that decides what it is compiled to; parts of equal keys, of whatever graphs, are compiled once.
        data: in a form of the backend's.
    """

    key: str
    data: bytes


@dataclass(frozen=True)
class GraphParts:
    """A lowered graph as its parts.

    Attributes:
        parts: each once, in the order of their first use.
        data: how they belong together, in a form of the backend's.
    """

    parts: tuple[GraphPart, ...]
    data: bytes


class GraphKind(Protocol):
    """The graphs of a kind of step, which differ in sizes.

    Attributes:
        parts: of the one executable that runs all of them.
    """

    @property
    def parts(self) -> GraphParts: ...

    def holds(self, lowered: LoweredProgram) -> bool:
        """Whether a graph of any bucket is one of them."""
        ...


class Backend(Protocol):
    """Lowers and compiles partitioned graphs for one kind of device, and opens the executables.

    A file or package in `lowering/backends` exports one as `BACKEND`. Only `name`, `suffix` and `lower` have no default; a backend
    overrides the other methods where the default does not fit.

    Attributes:
        name: the name in manifests and on the command line, and of its file or package.
        suffix: extension of its executables, without the dot; None where it has none.
        host_bound: whether executables hold code of the processor that they are built on. Others open on a host of another architecture.
        build_only: names in `versions` that decide the bytes of an executable, and not whether it opens.
        readable: whether executables are data, which `opened` reads.
    """

    name: str
    suffix: str | None
    host_bound: bool = True
    build_only: tuple[str, ...] = ()
    readable: bool = False

    def lower(self, partitioned: PartitionedProgram, platform: Platform = CPU) -> LoweredProgram:
        """The graph that this backend runs.

        Args:
            platform: chip, release and operator packages that it is lowered for.

        Raises:
            LoweringError: naming what the backend cannot express.
        """
        ...

    def prepare(self, cache_dir: Path) -> None:
        """Prepares this process to lower and compile; called before either, with a directory that outlives the process."""
        return

    def warm(self, cache_dir: Path) -> None:
        """Makes what all compiles need and take from that directory; a build calls it in a thread while it traces.

        Raises:
            LoweringError: as `compile`.
        """
        return

    def compile(self, lowered: LoweredProgram, *, cache_dir: Path, threads: int) -> CompiledFile:
        """Compiles one lowered graph; equal graphs give equal bytes.

        Args:
            cache_dir: the compiler's cache between compiles.
            threads: CPU threads that the code is specialised for; 0 asks the process at run time.

        Raises:
            LoweringError: naming what the backend cannot express, or quoting its compiler's error.
        """
        raise LoweringError(f"backend {self.name} compiles nothing: it reports cost and memory only")

    def parts(self, lowered: LoweredProgram, *, threads: int) -> GraphParts | None:
        """The parts of a graph that are compiled one by one and joined; None where a graph is compiled as one."""
        return None

    def samples(self, bucket: Bucket) -> tuple[Bucket, ...]:
        """Buckets whose lowered graphs say what those of this bucket's kind have in common; none where each is compiled for itself."""
        return ()

    def kind(self, samples: Sequence[LoweredProgram], *, threads: int) -> GraphKind:
        """What the graphs of a kind have in common.

        Raises:
            LoweringError: they differ in more than sizes.
        """
        raise LoweringError(f"backend {self.name} compiles every bucket for itself")

    def compile_part(self, part: GraphPart, *, cache_dir: Path, threads: int) -> bytes:
        """Compiles one part, or takes it from the cache.

        Raises:
            LoweringError: as `compile`.
        """
        raise LoweringError(f"backend {self.name} compiles graphs as one")

    def join(self, parts: GraphParts, compiled: Sequence[bytes], *, cache_dir: Path) -> CompiledFile:
        """The executable of a graph whose parts are compiled, in the order of `parts.parts`."""
        raise LoweringError(f"backend {self.name} compiles graphs as one")

    def opened(self, data: bytes) -> Any:
        """The bytes of an executable as a tree whose numbers can be read (lowering/between.py)."""
        raise LoweringError(f"executables of backend {self.name} are not readable")

    def closed(self, tree: Any) -> bytes:
        """The inverse of `opened`.

        Raises:
            LoweringError: the tree contradicts itself.
        """
        raise LoweringError(f"executables of backend {self.name} are not readable")

    def prove(self, compiled: CompiledFile, partitioned: PartitionedProgram | Claims, platform: Platform = CPU) -> None:
        """Checks the invariants of an executable that can be checked without running it, on the platform that it was lowered for.

        Executables that run on this machine are also run and compared with the reference (tools/prove).

        Raises:
            LoweringError: naming the invariant that is broken.
        """
        return

    def open(self, path: Path) -> HostExecutable:
        """Loads an executable that `compile` returned, for this machine's CPU; nothing is traced or compiled.

        Executables for devices with memory of their own are opened by the device (lowering/device.py).

        Raises:
            LoweringError: the file is not this backend's, or does not run on a CPU.
        """
        raise LoweringError(f"backend {self.name} has no executables that run on a CPU")

    def options(self, threads: int) -> Mapping[str, Any]:
        """The settings that decide the compiled bytes, besides graph and toolchain; part of a graph's key."""
        return {}

    def versions(self) -> Mapping[str, str]:
        """Versions of the packages, besides torch, that executables are built with; part of a graph's key and of a manifest's toolchain."""
        return {}

    def cpu_features(self) -> tuple[str, ...]:
        """CPU features that executables compiled here need, by their names in `torch.cpu.get_capabilities()`."""
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
    # Inheritance is required: a class that merely has the right methods would lack the defaults of the others.
    if Backend not in type(exported).__mro__ or exported.name != name:
        raise LoweringError(f"lowering/backends/{name}.py must export BACKEND, a Backend named {name!r}, and exports {exported!r}")
    chosen: Backend = exported
    return chosen


def open_executable(path: Path, name: str) -> HostExecutable:
    """Opens an executable that backend `name` compiled; nothing is traced or compiled.

    Raises:
        LoweringError: there is no such backend, its executables do not run on this machine, or the file is not one of them.
    """
    chosen = backend(name)
    if reason := chosen.runs_here():
        raise LoweringError(f"{path.name}: {reason}")
    return chosen.open(path)
