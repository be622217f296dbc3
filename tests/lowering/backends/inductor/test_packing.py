"""lowering/backends/inductor/packing.py: parameters are packed once for a process, and forgotten with the parameter."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import kernels as native_kernels
from torch._subclasses.fake_tensor import FakeTensorMode

from npucompile.graphs import native_ops, ops
from npucompile.graphs.ir.record import record
from npucompile.graphs.primitive import Primitive
from npucompile.graphs.types import Aval, Bucket, Leaf, Signature
from npucompile.lowering.backends.inductor import aoti, layouts, native, packing
from npucompile.lowering.backends.inductor import backend as inductor
from npucompile.lowering.backends.inductor.packing import Layout, Packer
from npucompile.lowering.executable import open_executable
from npucompile.lowering.lower import Lowered


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


TABLE, INT8, STATIC = (70, 48), (48, 37), (48, 20)
SIGNATURE = Signature(
    params=(
        Leaf("params.table", Aval(TABLE, torch.bfloat16)),
        *(Leaf("params.int8", Aval(INT8, torch.int8)), Leaf("params.scale", Aval(INT8[1:], torch.float32))),
        *(Leaf("params.static", Aval(STATIC, torch.int8)), Leaf("params.static_scale", Aval(STATIC[1:], torch.float32))),
        *(Leaf("params.bias", Aval(STATIC[1:], torch.int32)), Leaf("params.by", Aval((1,), torch.float32))),
        Leaf("params.offset", Aval((1,), torch.float32)),
    ),
    state=(),
    inputs=(Leaf("inputs.tokens", Aval((5,), torch.int32)),),
    outputs=tuple(Leaf(f"outputs.{name}", Aval((5, wide), torch.bfloat16)) for name, wide in (("y", 70), ("int8", 37), ("static", 20))),
)


def step(rule: Callable[[Primitive[Any]], Callable[..., Any]], *operands: torch.Tensor) -> list[torch.Tensor]:
    """Rows of a table that is the head, too, and products with weights of either kind of integers."""
    table, int8, scale, static, static_scale, bias, by, offset, tokens = operands
    x = rule(ops.embed)(tokens, table)
    return [
        rule(ops.linear)(x, table),
        rule(ops.quant_linear)(x, int8, scale),
        rule(ops.static_quant_linear)(x, static, static_scale, bias, by, offset),
    ]


def test_a_package_calls_every_native_operator_of_packed_weights(tmp_path: Path) -> None:
    fakes = [torch.empty(leaf.aval.shape, dtype=leaf.aval.dtype, device="meta") for leaf in SIGNATURE.operands]
    graph = record(lambda *operands: step(lambda p: p.lower_for("inductor"), *operands), fakes, FakeTensorMode(), "cpu")
    layouts.choose(graph)
    wanted = {native.op for native in native_ops.TABLE.values() if native.packed}
    assert wanted == {node.target for node in graph.graph.nodes} & wanted
    lowered = Lowered(Bucket("decode", 5, 1), "inductor", graph, SIGNATURE)
    (tmp_path / "step.pt2").write_bytes(inductor.BACKEND.compile(lowered, cache_dir=tmp_path / "cache", threads=1).data)
    generator = torch.Generator().manual_seed(0)
    operands = [torch.rand(leaf.aval.shape, generator=generator) for leaf in SIGNATURE.operands]
    for i, leaf in enumerate(SIGNATURE.operands):
        if leaf.aval.dtype == torch.int8:
            operands[i] = torch.randint(-127, 128, leaf.aval.shape, generator=generator)
        elif leaf.aval.dtype == torch.int32:
            operands[i] = torch.randint(0, 70, leaf.aval.shape, generator=generator)
        operands[i] = operands[i].to(leaf.aval.dtype)
    operands[0] -= 0.5
    product, *integers = open_executable(tmp_path / "step.pt2", "inductor")(operands)
    want, *exact = step(lambda p: p.rule("reference"), *operands)
    torch.testing.assert_close(product, want, rtol=1e-2, atol=1e-2)
    for got, wanted_integers in zip(integers, exact, strict=True):
        assert torch.equal(got, wanted_integers)
