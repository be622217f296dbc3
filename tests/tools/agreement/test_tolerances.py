"""tools/agreement/tolerances.py: what is measured, and which graphs are allowed more."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.toy_step import PLAIN, signature

from npucompile.graphs.types import Aval, Bucket, Leaf
from npucompile.tools.agreement.tolerances import ROUNDED_ACTIVATIONS, SUMMED, TOLERANCES, deviation, difference, together, tolerance_of


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
