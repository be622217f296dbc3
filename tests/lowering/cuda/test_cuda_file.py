"""lowering/cuda/cuda_file.py: the file of a graph for a GPU."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.cuda.cuda_file import MAGIC, CudaFile, arch_of, capability, decode, encode
from npucompile.lowering.platform import CUDA_ARCHS, Platform


@given(st.sampled_from(CUDA_ARCHS), st.binary())
def test_it_is_read_back(arch: str, graph: bytes) -> None:
    assert decode(encode(CudaFile(arch, graph))) == CudaFile(arch, graph)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "0 bytes are no graph"),
        (b"abc", "3 bytes are no"),
        (msgpack.packb([MAGIC, 2, "90", b""]), "version 2; this reads .* version 1"),
    ],
)
def test_anything_else_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(LoweringError, match=why):
        decode(data)


def test_capabilities_are_written_as_nvidia_does() -> None:
    assert [capability(arch) for arch in ("80", "89", "100")] == ["8.0", "8.9", "10.0"]
    assert [arch_of(Platform(f"sm_{arch}")) for arch in CUDA_ARCHS] == list(CUDA_ARCHS)
    with pytest.raises(LoweringError, match=r"the platform's chip is 'ascend910b'; legal for a GPU are sm_80, .*, sm_100"):
        arch_of(Platform("ascend910b", "9.1"))
