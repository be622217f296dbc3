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
from npucompile.lowering.backend import open_executable
from npucompile.lowering.backends.inductor import aoti, layouts, native
from npucompile.lowering.backends.inductor import backend as inductor
from npucompile.lowering.backends.inductor.packing import Layout, Packer
from npucompile.lowering.lower import LoweredProgram


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
    nibbles = torch.randint(-(2**31), 2**31, (2, 70, 3)).to(torch.int32)
    bf16 = {0: Layout("bf16", 1, 33, 17), 2: Layout("bf16", 3, 20, 64)}
    wanted = {**bf16, 3: Layout("int8", 1, 70, 37), 4: Layout("int4", 2, 70, 3), 5: Layout("f32", 1, 33, 17)}
    params = [first, torch.zeros(1), second, integers, nibbles, torch.randn(33, 17)]
    made = Packer(library).pack(params, wanted)
    assert sorted(made) == sorted(wanted)
    for i, plain in ((i, params[i]) for i in wanted):
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


TABLE, INT8, STATIC, INT4, E = (70, 48), (48, 37), (48, 20), (48, 32 // 8), 3
WIDE, DOWN, WIDE4, DOWN4 = (E, 2, 20, 48), (E, 48, 20), (E, 48, 2 * 16 // 8), (E, 16, 48 // 8)
BF16, F32, I32 = torch.bfloat16, torch.float32, torch.int32
PARAMS = {
    **{"table": (TABLE, BF16), "table32": (TABLE, F32)},
    **{"int8": (INT8, torch.int8), "scale": (INT8[1:], F32)},
    **{
        "static": (STATIC, torch.int8),
        "static_scale": (STATIC[1:], F32),
        "bias": (STATIC[1:], I32),
        "by": ((1,), F32),
        "offset": ((1,), F32),
    },
    **{"int4": (INT4, I32), "int4_scale": ((1, 32), F32)},
    **{"share": ((5, 2), F32), "ids": ((5, 2), I32), "gate_up": (WIDE, BF16), "down": (DOWN, BF16)},
    **{"counts": ((E,), torch.int64), "gate_up4": (WIDE4, I32), "gate_up4_scale": ((E, 1, 32), F32)},
    **{"down4": (DOWN4, I32), "down4_scale": ((E, 1, 48), F32)},
    **{"rows8": ((5, 48), torch.int8), "rows8_scale": ((5,), F32), "counts8": ((E,), torch.int64)},
    **{"gate_up8": ((E, 48, 40), torch.int8), "gate_up8_scale": ((E, 40), F32)},
    **{"down8": ((E, 20, 48), torch.int8), "down8_scale": ((E, 48), F32)},
}
RESULTS = {"y": 70, "int4": 32, "experts": 48, "experts4": 48, "experts8": 48, "int8": 37, "static": 20, "y32": 70}
SIGNATURE = Signature(
    params=tuple(Leaf(f"params.{name}", Aval(shape, dtype)) for name, (shape, dtype) in PARAMS.items()),
    state=(),
    inputs=(Leaf("inputs.tokens", Aval((5,), I32)),),
    outputs=tuple(Leaf(f"outputs.{name}", Aval((5, wide), F32 if name == "y32" else BF16)) for name, wide in RESULTS.items()),
)


def step(rule: Callable[[Primitive[Any]], Callable[..., Any]], *operands: torch.Tensor) -> list[torch.Tensor]:
    """Rows of a table that is the head, too, and products with weights of every kind of integers, alone and of experts."""
    table, table32, int8, scale, static, static_scale, bias, by, offset, int4, int4_scale, *experts, tokens = operands
    x = rule(ops.embed)(tokens, table)
    return [
        rule(ops.linear)(x, table),
        rule(ops.weight_quant_linear)(x, int4, int4_scale),
        rule(ops.moe_experts)(x, *experts[:4]),
        rule(ops.grouped_experts_w4a16)(x, *experts[4:9]),
        rule(ops.grouped_experts_w8a8)(*experts[9:], BF16),
        rule(ops.quant_linear)(x, int8, scale),
        rule(ops.static_quant_linear)(x, static, static_scale, bias, by, offset),
        rule(ops.linear)(rule(ops.embed)(tokens, table32), table32),
    ]


def value(leaf: Leaf, generator: torch.Generator) -> torch.Tensor:
    """Numbers that its operators take: any bits of int4, choices of an expert more than there are, and rows for all but the second."""
    name, (shape, dtype) = leaf.name.split(".")[1], (leaf.aval.shape, leaf.aval.dtype)
    if name.startswith("counts"):
        return torch.tensor([2, 0, 3])
    low, high = {"tokens": (0, 70), "ids": (0, E + 1), "bias": (0, 70)}.get(name, (-(2**31), 2**31))
    if dtype == torch.int8:
        low, high = -127, 128
    if not dtype.is_floating_point:
        return torch.randint(low, high, shape, generator=generator).to(dtype)
    return (torch.rand(shape, generator=generator) - (0.5 if dtype == BF16 else 0)).to(dtype)


@pytest.mark.long
def test_a_package_calls_every_native_operator_of_packed_weights(tmp_path: Path) -> None:
    fakes = [torch.empty(leaf.aval.shape, dtype=leaf.aval.dtype, device="meta") for leaf in SIGNATURE.operands]
    graph = record(lambda *operands: step(lambda p: p.lower_for("inductor"), *operands), fakes, FakeTensorMode(), "cpu")
    layouts.choose(graph)
    wanted = {native.op for native in native_ops.TABLE.values() if native.packed}
    assert wanted == {node.target for node in graph.graph.nodes} & wanted
    lowered = LoweredProgram(Bucket("decode", 5, 1), "inductor", graph, SIGNATURE)
    (tmp_path / "step.pt2").write_bytes(inductor.BACKEND.compile(lowered, cache_dir=tmp_path / "cache", threads=1).data)
    generator = torch.Generator().manual_seed(0)
    operands = [value(leaf, generator) for leaf in SIGNATURE.operands]
    got, want = open_executable(tmp_path / "step.pt2", "inductor")(operands), step(lambda p: p.rule("reference"), *operands)
    for product, wanted_product in zip(got[:5], want[:5], strict=True):
        torch.testing.assert_close(product, wanted_product, rtol=2e-2, atol=1e-2 * float(wanted_product.abs().max()))
    for integers, wanted_integers in zip(got[5:7], want[5:7], strict=True):
        assert torch.equal(integers, wanted_integers)
    torch.testing.assert_close(got[7], want[7], rtol=1e-5, atol=1e-5)
