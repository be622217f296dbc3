"""lowering/backends/inductor/packing.py: parameters are packed once for a process, and forgotten with the parameter."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from support import kernels as native_kernels

from npucompile.lowering.backends.inductor import aoti, native, packing
from npucompile.lowering.backends.inductor.packing import Layout, Packer


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return native.packer(aoti.compiler()[0], aoti.instruction_set() or "native", tmp_path_factory.mktemp("cache")).read_bytes()


def bytes_of(packed: torch.Tensor, size: int) -> torch.Tensor:
    """All bytes of a packed parameter, those behind the tensor included."""
    whole = packed.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(whole, packed.data_ptr() - whole.data_ptr(), (size,)).clone()


def test_packing_is_that_of_the_kernels_with_the_shape_of_the_parameter(library: bytes) -> None:
    first, second = torch.randn(33, 17).to(torch.bfloat16), torch.randn(3, 20, 64).to(torch.bfloat16)
    integers = torch.randint(-128, 128, (70, 37), dtype=torch.int8)
    wanted = {0: Layout("bf16", 1, 33, 17), 2: Layout("bf16", 3, 20, 64), 3: Layout("int8", 1, 70, 37)}
    made = Packer(library).pack([first, torch.zeros(1), second, integers], wanted)
    assert sorted(made) == [0, 2, 3]
    for i, plain in ((0, first), (2, second), (3, integers)):
        want = native_kernels.packed(plain, wanted[i].kind)
        assert (made[i].shape, made[i].dtype, made[i].is_contiguous()) == (plain.shape, plain.dtype, True)
        assert made[i].data_ptr() % 64 == 0
        assert torch.equal(bytes_of(made[i], len(want)), want)


def test_a_parameter_is_packed_once_for_a_process_and_forgotten_with_it(library: bytes) -> None:
    plain, layout = torch.randn(64, 64).to(torch.bfloat16), Layout("bf16", 1, 64, 64)
    one, other = (Packer(library).pack([plain], {0: layout})[0] for _ in range(2))
    assert one is other
    assert Packer(library).pack([plain.view(32, 128)], {0: Layout("bf16", 1, 32, 128)})[0].data_ptr() != one.data_ptr()
    kept = weakref.ref(one)
    del plain, one, other
    gc.collect()
    assert kept() is None


def test_equal_sources_give_equal_libraries(library: bytes, tmp_path: Path) -> None:
    assert native.packer(aoti.compiler()[0], aoti.instruction_set() or "native", tmp_path).read_bytes() == library


def test_memory_for_packed_parameters_starts_at_a_huge_page() -> None:
    assert packing.huge(100).data_ptr() % (2 * 2**20) == 0
