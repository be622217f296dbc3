"""What the backends for NPUs share: they convert with torch_npu wherever it is installed, and run where CANN is too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...graphs.errors import LoweringError
from ..backend import Backend, Claims, CompiledFile
from ..platform import CPU, Platform
from .toolchain import harness
from .toolchain.stubs import cann

if TYPE_CHECKING:
    from ...graphs.spmd.partition import PartitionedProgram
    from ..lower import LoweredProgram


class NpuBackend(Backend):
    """Files name operators and no processor: what is built on x86-64 opens on aarch64.

    Modules of torch_npu are loaded by `prepare`, not when the backend is imported.

    Attributes:
        graph: what a file of the backend holds, in the words of a message.
    """

    graph: str
    host_bound = False
    build_only = tuple(name for name in harness.DISTRIBUTIONS if name != "torch_npu")

    def __init__(self) -> None:
        self._loaded: harness.Torchair | None = None

    def prepare(self, cache_dir: Path) -> None:
        """Loads torchair, which registers operators and converts graphs; without CANN, over stub libraries cached in `cache_dir`.

        Raises:
            LoweringError: saying what is missing and how to install it.
        """
        self._loaded = harness.load(cache_dir)

    def lower(self, partitioned: PartitionedProgram, platform: Platform = CPU) -> LoweredProgram:
        """Lowers to bodies of NPU operators, each kind of layer once."""
        from .lowered import lower

        self.torchair()
        return lower(partitioned, platform, self.name)

    def prove(self, compiled: CompiledFile, partitioned: PartitionedProgram | Claims, platform: Platform = CPU) -> None:
        """Checks that pools are written in place, no length is baked in, no step computes from weights alone, collectives are those of the
        partitioned graph in an order that devices keep, and a device takes every operator where the platform names a chip.

        Limits on the sizes of a model are left out for models narrower than `SMALLEST_MODEL` of legality/check.py: no kernel is made
        for those, which are shrunk to be tested and emulated. `npucompile inspect` lists what CANN would refuse of them.
        """
        from .. import collectives_check
        from .legality import check as legality
        from .shipped import ENCODINGS

        encoding = ENCODINGS[self.name]
        graph = encoding.decode(compiled.data)
        encoding.check(graph, partitioned.signature)
        collectives_check.agree(partitioned.collectives, encoding.collectives(graph))
        if platform.chip:
            legality.prove(graph, platform, sizes=legality.has_kernels(partitioned.signature.params))

    def torchair(self) -> harness.Torchair:
        """What `prepare` loaded.

        Raises:
            LoweringError: it was not called.
        """
        if self._loaded is None:
            raise LoweringError(f"backend {self.name} is not prepared in this process; call its `prepare` before it lowers or compiles")
        return self._loaded

    def options(self, threads: int) -> Mapping[str, Any]:
        """The sources that make and check executables."""
        from . import sources

        return {"sources": sources.digest()}

    def versions(self) -> Mapping[str, str]:
        """Versions of torch_npu and the distributions that it needs."""
        versions = harness.installed()
        return {name: versions.get(name, "") for name in harness.DISTRIBUTIONS}

    def compiles_here(self) -> str | None:
        """Says which part of torch_npu is missing."""
        return harness.available()

    def runs_here(self) -> str | None:
        """Says that CANN or a part of torch_npu is missing."""
        if reason := harness.lacking(harness.installed()):
            return reason
        return None if cann(None) else f"running {self.graph} needs CANN and an NPU, and this machine has no CANN"
