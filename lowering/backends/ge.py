"""The backend of GE graphs for Ascend NPUs: builds and checks them on any machine, runs them where CANN is installed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..ascend.npu_backend import NpuBackend
from ..backend import Claims, CompiledFile
from ..platform import CPU, Platform

if TYPE_CHECKING:
    from ...graphs.spmd.partition import PartitionedProgram
    from ..lower import LoweredProgram


class Ge(NpuBackend):
    """Converts graphs with torchair.

    A GE graph names operators and no processor: what is built on x86-64 opens on aarch64. torchair of the same torch_npu must load it,
    with the torch of that release; the packages that torchair used to convert it are done with.
    """

    name = "ge"
    suffix = "ge"
    graph = "a GE graph"
    readable = True

    def compile(self, lowered: LoweredProgram, *, cache_dir: Path, threads: int) -> CompiledFile:
        """Converts to one GE graph for all ranks, in the format of lowering/ascend/ge_file.py, its operators in the order of a schedule."""
        from ..ascend.link import link
        from ..ascend.overlap import in_order_of_time
        from ..ascend.prefetch import in_ge
        from ..ascend.shipped import GE

        ge_file = link(lowered.graph, lowered.signature, self.torchair(), platform=lowered.platform)
        ge_file = in_ge(in_order_of_time(ge_file, lowered.mesh, lowered.platform), lowered.mesh, lowered.platform)
        return CompiledFile(GE.encode(ge_file), GE.census(ge_file))

    def opened(self, data: bytes) -> Any:
        """A GE file without its graph, and that as messages of kinds of operators."""
        from ..ascend.ge_file import decode
        from ..ascend.ge_operators import opened

        ge_file = decode(data)
        return replace(ge_file, graph=b""), opened(ge_file.graph)

    def closed(self, tree: Any) -> bytes:
        """The inverse of `opened`."""
        from ..ascend.ge_file import encode
        from ..ascend.ge_operators import closed

        ge_file, graph = tree
        return encode(replace(ge_file, graph=closed(*graph)))

    def prove(self, compiled: CompiledFile, partitioned: PartitionedProgram | Claims, platform: Platform = CPU) -> None:
        """Checks besides that no step computes a value twice."""
        from ..ascend import inspect_repeats
        from ..ascend.ge_file import decode
        from ..ascend.ge_operators import last

        super().prove(compiled, partitioned, platform)
        inspect_repeats.check_unrepeated(decode(compiled.data))
        last.clear()


BACKEND = Ge()
