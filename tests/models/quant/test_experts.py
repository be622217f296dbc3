"""models/quant/experts.py: experts in any format are SwiGLU of the matrices that the format stands for, part by part."""

from __future__ import annotations

import pytest
import torch

from npucompile.graphs import ops
from npucompile.graphs.quantise import quantise_rows
from npucompile.models.quant import leaves
from npucompile.models.quant.experts import grouped, rounds_rows
from npucompile.models.quant.leaves import DeclaredMatrix

R = torch.Generator().manual_seed(0)
T, K, N, E = 5, 16, 24, 3
FORMS = [("w8a8_dynamic", 0, 0.02), ("w4a8_dynamic", 0, 0.2), ("w4a8_dynamic", 4, 0.15)]


def weight_of(matrix: DeclaredMatrix, form: str, group: int, values: torch.Tensor) -> dict[str, torch.Tensor]:
    names = leaves.avals(matrix, form, group)
    return dict(zip(names, leaves.from_floats(matrix, form, group, values), strict=True))


def error(actual: torch.Tensor, want: torch.Tensor) -> float:
    return float((actual - want).square().mean().sqrt() / want.std())


@pytest.mark.parametrize(("form", "group", "tolerance"), [("float", 0, 1e-6), *FORMS])
def test_experts_of_every_form(form: str, group: int, tolerance: float) -> None:
    gate_up, down = torch.randn(E, 2, 16, K, generator=R) / 4, torch.randn(E, K, 16, generator=R) / 4
    x, counts = torch.randn(T, K, generator=R), torch.tensor([2, 0, 3])
    first, second = DeclaredMatrix(gate_up.shape, (None,) * 4, 1, False), DeclaredMatrix(down.shape, (None,) * 3, 1, True, 2)
    rows, scale = (x, torch.ones(T)) if form == "float" else quantise_rows(x)
    weights = [
        {"weight": matrix.turned(values).contiguous()} if form == "float" else weight_of(matrix, form, min(group, 4), values)
        for matrix, values in ((first, gate_up), (second, down))
    ]
    assert rounds_rows(weights[0]) == (form != "float")
    want = torch.cat([ops.swiglu_linear(x[:2], gate_up[0]) @ down[0].t(), ops.swiglu_linear(x[2:], gate_up[2]) @ down[2].t()])
    assert error(grouped(rows, scale, counts, *weights, torch.float32), want) <= 2 * tolerance
