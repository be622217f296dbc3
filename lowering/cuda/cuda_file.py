"""The file of one bucket's graph for a GPU: a flat graph of aten operators, and the compute capability that it is for.

It holds nothing compiled, so it is the same wherever it is built; the first machine with a GPU compiles it.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgpack

from ...graphs.errors import LoweringError
from ..platform import CUDA_ARCHS, Platform

MAGIC, VERSION = "npucompile.cuda", 1
SUFFIX = "cuda"


@dataclass(frozen=True)
class CudaFile:
    """A graph for a GPU.

    Attributes:
        arch: compute capability without the point, "90" for 9.0.
        graph: serialised (lowering/artifact/graph_io.py); its placeholders are the operands of the signature, its tensors are on "cuda".
    """

    arch: str
    graph: bytes


def encode(cuda_file: CudaFile) -> bytes:
    """Serialises a graph; equal graphs give equal bytes."""
    packed: bytes = msgpack.packb([MAGIC, VERSION, cuda_file.arch, cuda_file.graph])
    return packed


def decode(data: bytes) -> CudaFile:
    """Reads what `encode` wrote.

    Raises:
        LoweringError: it is no such file, or of another version.
    """
    try:
        magic, version, arch, graph = msgpack.unpackb(data)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise LoweringError(f"{len(data)} bytes are no graph for a GPU: {error}") from error
    if (magic, version) != (MAGIC, VERSION):
        raise LoweringError(f"the graph for a GPU is {magic!r} version {version!r}; this reads {MAGIC!r} version {VERSION}")
    return CudaFile(arch, graph)


def arch_of(platform: Platform) -> str:
    """The compute capability that a platform's chip has, without the point.

    Raises:
        LoweringError: it is no GPU.
    """
    if not platform.chip.startswith("sm_"):
        raise LoweringError(
            f"the platform's chip is {platform.chip!r}; legal for a GPU are {', '.join(f'sm_{arch}' for arch in CUDA_ARCHS)}"
        )
    return platform.chip.removeprefix("sm_")


def capability(arch: str) -> str:
    """A compute capability as NVIDIA writes it: "90" is "9.0"."""
    return f"{arch[:-1]}.{arch[-1]}"
