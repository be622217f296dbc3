"""tools/agreement/tolerances.py: what is measured, and which graphs are allowed more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.toy_step import PLAIN, signature

from npucompile.graphs.types import Aval, Bucket, Leaf, Signature
from npucompile.tools.agreement.tolerances import (
    ROUNDED_ACTIVATIONS,
    SUMMED,
    TOLERANCES,
    deviation,
    difference,
    summing,
    together,
    tolerance_of,
)


def test_difference_is_relative_beyond_one_and_infinite_for_nan() -> None:
    assert difference([(torch.tensor([0.5]), torch.tensor([0.25]))]) == 0.25
    assert difference([(torch.tensor([8.0]), torch.tensor([4.0]))]) == 0.5
    assert difference([(torch.tensor([float("nan")]), torch.tensor([float("nan")]))]) == float("inf")
    assert difference([(torch.empty(0), torch.empty(0))]) == difference([]) == 0.0


def test_deviation_is_an_average_and_infinite_for_nan() -> None:
    assert deviation([(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0]))]) == 0.0
    assert deviation([(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 0.0]))]) == 1.0
    assert deviation([(torch.ones(100), torch.cat([torch.ones(99), torch.zeros(1)]))]) == pytest.approx(0.1)
    assert deviation([(torch.ones(2), torch.tensor([1.0, float("nan")]))]) == float("inf")
    assert deviation([(torch.empty(0), torch.empty(0))]) == deviation([]) == 0.0


def test_rows_together_are_what_most_of_them_are_unless_one_is_wrong() -> None:
    assert together(difference, [0.1, 0.3, 0.2]) == 0.3
    assert together(deviation, [0.1, 0.3, 0.2]) == 0.2
    assert together(deviation, [0.5, *[0.01] * 97]) == pytest.approx(0.15)
    assert together(deviation, [1.0, *[0.01] * 97]) > TOLERANCES[torch.bfloat16].logits
    assert together(deviation, [float("inf"), *[0.01] * 97]) == float("inf")
    assert together(deviation, []) == together(difference, []) == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_only_graphs_that_round_activations_to_int8_are_allowed_more(dtype: torch.dtype) -> None:
    """int8 weights meet activations in int8; those of int4 beside floats are packed into int32."""
    plain = signature(Bucket("decode", 4, 1), PLAIN)
    for weights, wanted in ((torch.int8, ROUNDED_ACTIVATIONS), (torch.int32, TOLERANCES[torch.bfloat16])):
        params = (*plain.params, Leaf("layers.0.weight", Aval((4, 4), weights)))
        allowed = tolerance_of(dtype, replace(plain, params=params))
        assert allowed == (wanted if dtype == torch.bfloat16 else TOLERANCES[dtype])
        assert tolerance_of(torch.float32, plain, ranks=2) == SUMMED


def chain(depth: int, width: int, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Logits of a residual network of so many layers, as models are: normalised, two products, added."""
    generator = torch.Generator().manual_seed(width + depth)

    def weights(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    x = torch.randn(6, width, generator=generator)
    for layer in range(depth):
        up, down = weights(2 * width, width), weights(width, 2 * width)
        own = product if layer == depth // 2 else by_halves if product in MUTANTS.values() else product
        x = x + own(torch.relu(own(x / x.square().mean(-1, keepdim=True).sqrt(), up)), down)
    return product(x / x.square().mean(-1, keepdim=True).sqrt(), weights(4 * width, width))


def weights_of(depth: int, width: int) -> Signature:
    shapes = [shape for _ in range(depth) for shape in ((width,), (2 * width, width), (width, 2 * width))]
    leaves = [Leaf(f"{i}", Aval(shape, torch.float32)) for i, shape in enumerate([*shapes, (width,), (4 * width, width)])]
    return replace(signature(Bucket("decode", 4, 1), PLAIN), params=tuple(leaves))


def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight.T


def by_halves(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As with vectors half as wide."""
    return sum((part @ own.T for part, own in zip(x.chunk(2, 1), weight.chunk(2, 1), strict=True)), torch.zeros(()))


def one_by_one(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As without vectors, which is off the most."""
    terms = x[:, None, :] * weight[None, :, :]
    return terms.flip(-1).cumsum(-1)[..., -1]


MUTANTS = {
    "a term is left out": lambda x, weight: by_halves(x[:, 1:], weight[:, 1:]),
    "a term is taken twice": lambda x, weight: by_halves(x, weight) + x[:, :1] * weight[:, 0],
    "products are rounded to bfloat16": lambda x, weight: by_halves(x.bfloat16().float(), weight.bfloat16().float()),
    "products are rounded to ten bits, as a matrix unit's": lambda x, weight: by_halves(x.half().float(), weight.half().float()),
    "rows are another's": lambda x, weight: by_halves(x.roll(1, 0), weight),
    "a thousandth is lost": lambda x, weight: by_halves(x, weight) * 0.999,
}


@pytest.mark.parametrize(("depth", "width"), [(1, 16), (2, 64), (8, 128), (24, 256), (48, 256)])
def test_what_float32_rounds_to_in_any_order_is_legal_and_a_wrong_kernel_is_not(depth: int, width: int) -> None:
    """Mutants are wrong in one layer and in the last product alone."""
    bound, expected = tolerance_of(torch.float32, weights_of(depth, width)).logits, chain(depth, width, plain)
    assert bound >= summing(weights_of(depth, width))
    orders = {"halves": by_halves} | ({"one by one": one_by_one} if depth <= 24 else {})
    for name, product in orders.items():
        assert difference([(expected, chain(depth, width, product))]) < bound / 2, name
    for name, mutant in MUTANTS.items():
        assert difference([(expected, chain(depth, width, mutant))]) > 10 * bound, name


def test_larger_models_are_allowed_what_their_sums_round_to() -> None:
    """24 layers of 1,024, where two orders were measured 1.04e-5 apart; 80 layers of 8,192 are still told from a wrong last digit."""
    small, large = weights_of(24, 1024), weights_of(80, 8192)
    assert tolerance_of(torch.float32, weights_of(2, 64)) == TOLERANCES[torch.float32]
    assert 2e-5 < tolerance_of(torch.float32, small).logits < 1e-4
    assert tolerance_of(torch.float32, large).logits < 3e-4
    assert tolerance_of(torch.float32, small).state == 4 * tolerance_of(torch.float32, small).logits
