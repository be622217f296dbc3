"""models/quant/product.py: a product reads any format; its numbers are those of the matrix that the format stands for, part by part."""

from __future__ import annotations

import pytest
import torch

from npucompile.graphs import ops
from npucompile.models import quant
from npucompile.models.quant import leaves
from npucompile.models.quant.leaves import DeclaredMatrix
from npucompile.models.quant.product import format_of, operands, regrouped

R = torch.Generator().manual_seed(0)
T, K, N, E = 5, 16, 24, 3
FORMS = [("w8a8_dynamic", 0, 0.02), *((form, *group) for form in ("w4a8_dynamic", "w4a16") for group in ((0, 0.2), (4, 0.15)))]


def weight_of(matrix: DeclaredMatrix, form: str, group: int, values: torch.Tensor) -> dict[str, torch.Tensor]:
    names = leaves.avals(matrix, form, group)
    return dict(zip(names, leaves.from_floats(matrix, form, group, values), strict=True))


def error(actual: torch.Tensor, want: torch.Tensor) -> float:
    return float((actual - want).square().mean().sqrt() / want.std())


@pytest.mark.parametrize(("form", "group", "tolerance"), FORMS)
def test_every_form_multiplies(form: str, group: int, tolerance: float) -> None:
    values, x = torch.randn(N, K, generator=R), torch.randn(T, K, generator=R)
    weight = weight_of(DeclaredMatrix((N, K), ("n", None), 0, False), form, group, values)
    assert format_of(weight) == form
    assert 0 < error(quant.linear(x, weight), x @ values.t()) < tolerance
    assert torch.equal(quant.linear(x, values), ops.linear(x, values))
    halves = torch.randn(2, 8, K, generator=R)
    gate_up = weight_of(DeclaredMatrix((2, 8, K), (None, "f", None), 0, False), form, group, halves)
    want = ops.swiglu_linear(x, halves)
    assert 0 < error(quant.swiglu(x, gate_up, "f"), want) < 2 * tolerance
    assert torch.equal(quant.swiglu(x, halves, "f"), want)


@pytest.mark.parametrize(("form", "group", "tolerance"), FORMS)
def test_each_part_of_a_contraction_is_rounded_by_itself(form: str, group: int, tolerance: float) -> None:
    values, x = torch.randn(N, K, generator=R), torch.randn(T, K, generator=R) * torch.tensor([1.0] * 8 + [100.0] * 8)
    whole = weight_of(DeclaredMatrix((N, K), (None, "k"), 0, True, 2), form, group, values)
    parts = quant.product.split_parts(whole, 0)
    if form == "w4a16":
        assert len(parts) == 1, "no activation is rounded"
        assert torch.equal(quant.row_parallel(x, whole, "k"), quant.linear(x, whole))
        return
    want = sum(quant.linear(rows, part) for rows, part in zip(x.chunk(2, -1), parts, strict=True))
    assert torch.equal(quant.row_parallel(x, whole, "k"), want)
    assert error(quant.row_parallel(x, whole, "k"), x @ values.t()) < tolerance


def test_static_scales_multiply() -> None:
    values, x = torch.randn(N, K, generator=R), torch.randn(T, K, generator=R).clamp(-5, 5)
    for matrix in (DeclaredMatrix((N, K), ("n", None), 0, False), DeclaredMatrix((N, K), (None, "k"), 0, True, 2)):
        weight = weight_of(matrix, "w8a8", 0, values)
        product = quant.row_parallel(x, weight, "k") if matrix.row else quant.linear(x, weight)
        assert format_of(weight) == "w8a8"
        assert 0 < error(product, x @ values.t()) < 0.02


def test_a_region_reads_the_tensors_of_a_weight_by_their_axes() -> None:
    matrix = DeclaredMatrix((E, 8, K), ("experts", None, "k"), 1, True, 2)
    for form, group, _ in FORMS:
        declared = leaves.avals(matrix, form, group)
        weight = weight_of(matrix, form, group, torch.randn(E, 8, K, generator=R))
        listed = operands(weight, matrix.axes, lead=1, row=True)
        assert [axes for _, axes in listed] == [aval.axes for aval in declared.values()]
        again, plain = regrouped([weight, matrix], [*(tensor for tensor, _ in listed), torch.ones(1)])
        assert all(torch.equal(again[name], weight[name]) for name in weight)
        assert plain.tolist() == [1]
