"""The backend for NVIDIA GPUs: graphs of aten operators, which AOTInductor compiles on the first machine that has one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...graphs.errors import LoweringError
from ..backend import Backend, Compiled
from ..cuda import cuda_file
from ..device import CUDA, missing
from ..platform import CPU, Platform

if TYPE_CHECKING:
    from ...graphs.spmd.partition import Partitioned
    from ..executable import HostExecutable
    from ..lower import Lowered

NAME = "inductor_cuda"


class InductorCuda(Backend):
    """Lowers to aten operators on "cuda". Primitives become their references: the native kernels of lowering/cpp are for CPUs.

    A file holds the checked graph and no code. Compiling needs triton, the CUDA toolkit and a GPU, whose properties decide the kernels, so
    that happens where a device opens the file (lowering/cuda/device.py).
    """

    name = NAME
    suffix = cuda_file.SUFFIX
    host_bound = False

    def lower(self, partitioned: Partitioned, platform: Platform = CPU) -> Lowered:
        """Replaces primitives by aten operators on a GPU; state is written in place."""
        from ..cuda import lowerings as lowerings
        from ..lower import lower_inline

        return replace(lower_inline(partitioned, NAME, "cuda"), platform=platform)

    def compile(self, lowered: Lowered, *, cache_dir: Path, threads: int) -> Compiled:
        """The graph itself, for the compute capability of the platform.

        Raises:
            LoweringError: the platform is no GPU, or a GPU cannot run the graph (lowering/cuda/check.py).
        """
        from ..artifact import graph_io
        from ..cuda import check

        check.check(lowered.graph)
        made = cuda_file.CudaFile(cuda_file.arch_of(lowered.platform), graph_io.encode(lowered.graph))
        return Compiled(cuda_file.encode(made), check.census(lowered.graph))

    def runs_here(self) -> str | None:
        """Why this machine runs nothing that is built for a GPU."""
        return missing(CUDA)

    def open(self, path: Path) -> HostExecutable:
        """Refuses: a device opens it."""
        raise LoweringError(f"{path.name} runs on a GPU, which opens it (lowering/device.py); a CPU runs none of it")


BACKEND = InductorCuda()
