import pytest
import torch

from npucompile.graphs import products


def operands(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return tuple(torch.randn(size, 700, generator=generator).to(dtype) for size in (rows, 3001))


@pytest.mark.parametrize("rows", [1, products.FEW_ROWS, products.FEW_ROWS + 1, 40])
def test_widened_products_are_those_of_bfloat16_rounded_once(rows):
    x, weight = operands(rows, torch.bfloat16)
    exact = (x.double() @ weight.double().t()).float()
    with products.widened():
        y = products.linear(x, weight)
    assert y.dtype == torch.bfloat16
    # Half a unit in the last of 8 bits, and what sums in float32 are off by.
    assert ((y.float() - exact).abs() <= 2**-8 * exact.abs() + 2**-16 * exact.abs().max()).all()
    if rows > products.FEW_ROWS:
        assert torch.equal(y, exact.bfloat16()) or (y != exact.bfloat16()).float().mean() < 0.01


def test_batches_of_products_are_widened_too():
    a, b = torch.randn(3, 20, 50).bfloat16(), torch.randn(3, 50, 30).bfloat16()
    with products.widened():
        assert torch.equal(products.bmm(a, b), torch.bmm(a.float(), b.float()).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elsewhere_products_are_torchs_own(dtype):
    x, weight = operands(12, dtype)
    with products.widened(dtype == torch.float32):
        assert torch.equal(products.linear(x, weight), torch.nn.functional.linear(x, weight))
        assert torch.equal(products.bmm(x[None], weight.t()[None]), torch.bmm(x[None], weight.t()[None]))
