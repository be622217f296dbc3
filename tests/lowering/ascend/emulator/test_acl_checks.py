"""lowering/ascend/emulator/acl_checks.py: formats and communicators that a device does not take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import acl_graphs as ag
from support import ge_bodies as gb
from support.emulated import on_device, on_devices, opened

from npucompile.graphs.errors import LoweringError
from npucompile.graphs.types import Mesh
from npucompile.lowering.ascend import packages
from npucompile.lowering.ascend.acl_graph.formats import weight_operands
from npucompile.lowering.ascend.emulator.device import EmulatedDevice, open_device


@pytest.fixture
def device():
    device = open_device(0)
    yield device
    device.close()


@pytest.fixture(scope="module", autouse=True)
def operators(tmp_path_factory: pytest.TempPathFactory) -> None:
    gb.loaded(tmp_path_factory.mktemp("stubs"))


def test_nz_is_for_weights_of_products(device: EmulatedDevice, tmp_path: Path) -> None:
    made, _ = ag.of_body(
        lambda x, w, v: (torch.ops.npu.npu_linear(x, w) + v.sum(),),
        inputs_x=((4, 16), ag.BF16), inputs_w=((32, 16), ag.BF16), inputs_v=((32, 16), ag.BF16),
    )  # fmt: skip
    x, w, v = (on_device(device, torch.ones(shape, dtype=ag.BF16)) for shape in ((4, 16), (32, 16), (32, 16)))
    executable = opened(device, made, tmp_path)
    assert executable.nz_operands == {1}
    with pytest.raises(LoweringError, match=r"operand inputs.v is in NZ and read by aten.sum.default; legal is ND"):
        executable.compile([x, device.to_nz(w), device.to_nz(v)])
    executable.compile([x, device.to_nz(w), v])


def test_int8_weights_of_the_first_product_of_experts_are_in_nz_alone(device: EmulatedDevice, tmp_path: Path) -> None:
    def body(x: Any, weight: Any, scale: Any, rows: Any, counts: Any) -> tuple[Any, ...]:
        out, _ = torch.ops.npu.npu_grouped_matmul_swiglu_quant_v2(x, [weight], [scale], rows, counts, group_list_type=1)
        return (out,)

    shapes = {"x": ((4, 32), torch.int8), "weight": ((2, 32, 64), torch.int8), "scale": ((2, 64), ag.F32), "rows": ((4,), ag.F32)}
    operands = {**{f"inputs_{name}": shape for name, shape in shapes.items()}, "inputs_counts": ((2,), ag.I64)}
    made, _ = ag.of_body(body, **operands)
    there = [on_device(device, torch.ones(shape).to(dtype)) for shape, dtype in operands.values()]
    with pytest.raises(LoweringError, match=r"takes inputs.weight, int8 in ND; legal is NZ for int8 weights"):
        opened(device, made, tmp_path).compile(there)
    opened(device, made, tmp_path).compile([there[0], device.to_nz(there[1]), *there[2:]])


def test_fused_experts_take_int4_in_nz_alone_and_share_their_communicator_with_nothing(tmp_path: Path) -> None:
    packages.declare()
    shapes = {
        "x": ((24, 64), ag.BF16), "up": ((2, 64, 8), ag.I32), "down": ((2, 32, 8), ag.I32), "ids": ((24, 2), ag.I32),
        "scale": ((2, 64), ag.I64), "assist": ((2, 64), ag.F32), "probs": ((24, 2), ag.F32),
    }  # fmt: skip

    def compiled(in_nz: bool, beside: str) -> Any:
        def body(x: Any, up: Any, down: Any, ids: Any, scale: Any, assist: Any, probs: Any) -> tuple[Any, ...]:
            fused = torch.ops.npucompile_packages.dispatch_ffn_combine_w4a8
            out = fused(x, up, down, ids, scale, scale, assist, assist, probs, "dispatch", 2, 96)
            sent = torch.ops.npu.npu_moe_distribute_dispatch_v2(x, ids, beside, 2, 0, 4, quant_mode=0)[0] if beside else x
            return (out + 1, sent + 1)

        made, _ = ag.of_body(body, **{f"inputs_{name}": shape for name, shape in shapes.items()})
        assert weight_operands(made) == (1, 2)

        def work(device: EmulatedDevice, rank: int, names: Any) -> bool:
            operands = [on_device(device, torch.zeros(shape, dtype=dtype)) for shape, dtype in shapes.values()]
            if in_nz:
                operands[1:3] = map(device.to_nz, operands[1:3])
            return bool(opened(device, made, tmp_path, rank, names).compile(operands))

        return on_devices(Mesh.parse("tp=2"), work)

    assert compiled(True, "") == [True, True]
    for in_nz, beside, message in (
        (False, "", "takes inputs.up, int32 in ND; legal is NZ"),
        (True, "dispatch", "a communicator of its own"),
    ):
        for error in compiled(in_nz, beside):
            assert isinstance(error, LoweringError)
            assert message in str(error)


def test_the_expert_exchange_shares_its_communicator_with_nothing(tmp_path: Path) -> None:
    def body(x: Any, ids: Any, group: str, ranks: int) -> tuple[Any, ...]:
        rows, *_ = torch.ops.npu.npu_moe_distribute_dispatch_v2(x, ids, group, ranks, 0, 8, quant_mode=0)
        return (rows.sum() + torch.ops._c10d_functional.all_reduce(x, "sum", "tp").sum(),)

    def compiled(group: str, ranks: int) -> Any:
        made, _ = ag.of_body(lambda x, ids: body(x, ids, group, ranks), inputs_x=((4, 32), ag.BF16), inputs_ids=((4, 2), ag.I32))

        def work(device: EmulatedDevice, rank: int, names: Any) -> bool:
            operands = [on_device(device, torch.ones(4, 32, dtype=ag.BF16)), on_device(device, torch.zeros(4, 2, dtype=ag.I32))]
            return bool(opened(device, made, tmp_path, rank, names).compile(operands))

        return on_devices(Mesh.parse("tp=2"), work)

    assert compiled("dispatch", 2) == [True, True]
    for group, ranks, message in (("tp", 2, "legal is a communicator of its own"), ("dispatch", 4, "members is 4; legal is 2, that of")):
        for error in compiled(group, ranks):
            assert isinstance(error, LoweringError)
            assert message in str(error)
