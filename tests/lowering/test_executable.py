"""lowering/executable.py: executables are opened by the name of their backend; operands that they would misread are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from npucompile.graphs.errors import LoweringError
from npucompile.graphs.types import Aval, Leaf, Signature
from npucompile.lowering.artifact import graph_io
from npucompile.lowering.backend import open_executable
from npucompile.lowering.executable import check_operands

SIGNATURE = Signature(
    params=(Leaf("params.w", Aval((3, 2), torch.float32)),),
    state=(Leaf("state.pool", Aval((4, 2), torch.float32)),),
    inputs=(Leaf("inputs.slots", Aval((2,), torch.int32)),),
    outputs=(Leaf("outputs.y", Aval((2, 3), torch.float32)),),
)


def operands() -> list[torch.Tensor]:
    return [torch.ones(3, 2), torch.zeros(4, 2), torch.tensor([1, 3], dtype=torch.int32)]


def step(w: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor]:
    read = pool[slots]
    pool.copy_(torch.ops.aten.index_put(pool, [slots], read + 1))
    return (torch.nn.functional.linear(read + 1, w),)


def test_an_eager_file_runs_and_updates_state_in_place(tmp_path: Path) -> None:
    (tmp_path / "a.graph").write_bytes(graph_io.encode(make_fx(step, tracing_mode="fake")(*operands())))
    executable = open_executable(tmp_path / "a.graph", "eager")
    values = operands()
    assert executable.backend == "eager"
    (first,) = executable(values)
    (second,) = executable(values)
    assert first.tolist() == [[2.0] * 3] * 2
    assert second.tolist() == [[4.0] * 3] * 2
    assert values[1].tolist() == [[0, 0], [2, 2], [0, 0], [2, 2]]


def test_a_backend_that_only_reports_has_nothing_to_load(tmp_path: Path) -> None:
    with pytest.raises(LoweringError, match="a: backend null has no executables"):
        open_executable(tmp_path / "a", "null")


def test_what_this_machine_cannot_run_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(LoweringError, match=r"a\.ge: running a GE graph needs CANN and an NPU, and this machine has no CANN"):
        open_executable(tmp_path / "a.ge", "ge")


def test_an_unknown_backend_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoweringError, match=r"no backend 'tpu'; legal are .*inductor"):
        open_executable(tmp_path / "a", "tpu")


@pytest.mark.parametrize("name", ["eager", "inductor"])
@pytest.mark.parametrize("content", [None, b"", b"not an executable"])
def test_a_file_of_another_kind_is_refused_by_name(tmp_path: Path, name: str, content: bytes | None) -> None:
    path = tmp_path / "a.pt2"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(LoweringError):
        open_executable(path, name)


def test_right_operands_pass() -> None:
    check_operands(operands(), SIGNATURE)


@pytest.mark.parametrize(
    ("at", "wrong", "message"),
    [
        (0, torch.ones(2, 3), r"params.w is \(2, 3\) torch.float32, the graph needs \(3, 2\) torch.float32"),
        (1, torch.zeros(4, 2).bfloat16(), r"state.pool is \(4, 2\) torch.bfloat16, the graph needs \(4, 2\) torch.float32"),
        (2, torch.zeros(2, dtype=torch.int64), r"inputs.slots is \(2,\) torch.int64, the graph needs \(2,\) torch.int32"),
        (0, torch.ones(2, 3).T, r"params.w has strides \(1, 3\); legal is contiguous"),
        (1, torch.zeros(4, 4)[:, :2], r"state.pool has strides \(4, 1\); legal is contiguous"),
    ],
)
def test_a_wrong_operand_is_named(at: int, wrong: torch.Tensor, message: str) -> None:
    values = operands()
    values[at] = wrong
    with pytest.raises(LoweringError, match=f"operand {message}"):
        check_operands(values, SIGNATURE)


@pytest.mark.parametrize("count", [0, 2, 4])
def test_a_wrong_number_of_operands_is_refused(count: int) -> None:
    with pytest.raises(LoweringError, match=f"{count} operands, the graph has 3: 1 params, 1 state, 1 inputs"):
        check_operands((operands() * 2)[:count], SIGNATURE)
