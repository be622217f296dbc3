"""lowering/cpp/linear_bf16.cpp, linear_int8.cpp and their products: every variant of the instruction sets that this machine runs."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npucompile.graphs import ops

BF16 = torch.bfloat16

ROUNDED = 2.0**-8
"""Relative to the largest value: results are rounded once, when they are stored."""


@pytest.fixture(scope="module")
def run(variant: ModuleType) -> ModuleType:
    return variant


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert got.isfinite().all(), "nothing that nobody wrote was read"
    assert (got.double() - want).abs().max() <= ROUNDED * want.abs().max() + 1e-30


def apart(x: torch.Tensor, by: int) -> torch.Tensor:
    """The same rows with `by` undefined elements between them."""
    wide = torch.full((len(x), x.shape[1] + by), float("nan"), dtype=x.dtype)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


@settings(max_examples=60)
@given(st.integers(1, 65), st.integers(1, 90), st.integers(1, 130), st.integers(0, 5))
def test_the_product_is_that_of_wider_numbers(run: ModuleType, M: int, N: int, K: int, by: int) -> None:
    x, weight = randn(M, K), randn(N, K, seed=1)
    close(run.linear_bf16(apart(x, by), weight), x.double() @ weight.double().T)


@pytest.mark.parametrize(("N", "K"), [(1, 1), (33, 17), (200, 300), (48, 4200), (64, 1030), (1792, 40)])
def test_a_row_is_the_same_in_any_company(run: ModuleType, N: int, K: int) -> None:
    """Bit for bit, whatever blocks rows are cut into: a request's tokens must not depend on other rows or on the number of threads.

    With 4,200 columns 300 rows are more than stay in the cache at a time, with 1,030 sums are put down on the way, and results of 1,792
    channels are more than caches should hold.
    """
    x, weight = randn(300, K), randn(N, K, seed=1)
    whole = run.linear_bf16(x, weight)
    close(whole, x.double() @ weight.double().T)
    for threads in (1, 2):
        with run.threads(threads):
            for count in (*range(1, 35), 47, 64, 65, 130):
                assert torch.equal(run.linear_bf16(x[3 : 3 + count], weight), whole[3 : 3 + count])


@settings(max_examples=30)
@given(st.integers(1, 70), st.integers(1, 90), st.integers(1, 70), st.sampled_from([torch.int32, torch.int64]))
def test_rows_are_picked_out_of_panels_as_they_were(run: ModuleType, V: int, M: int, T: int, dtype: torch.dtype) -> None:
    table = randn(V, M)
    tokens = torch.randint(V, (T,), generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(run.embed_bf16(tokens, table), table[tokens.long()])


def integers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


@settings(max_examples=60)
@given(st.integers(1, 65), st.integers(1, 90), st.integers(1, 300), st.integers(0, 5), st.sampled_from([BF16, torch.float32]))
def test_products_of_integers_are_the_references_bit_for_bit(run: ModuleType, M: int, N: int, K: int, by: int, dtype: torch.dtype) -> None:
    x, weight, scale = 3 * randn(M, K).to(dtype), integers(K, N, seed=1), 1e-3 * randn(N, seed=2).float()
    x[0] = 0
    assert torch.equal(run.quant_linear(apart(x, by), weight, scale), ops.quant_linear(x, weight, scale))
    bias = torch.randint(-(2**20), 2**20, (N,), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    rounding = torch.tensor([0.031]), torch.tensor([-7.0])
    got = run.static_quant_linear(apart(x, by), weight, scale, bias, *rounding)
    assert torch.equal(got, ops.static_quant_linear(x, weight, scale, bias, *rounding))


def test_integers_of_any_size_are_exact_for_many_rows_and_both_threads(run: ModuleType) -> None:
    """Weights and rows of the largest magnitude, where sums of pairs leave 16 bits."""
    x = torch.full((150, 700), -1.0)
    x[::2] *= -1
    weight, scale = torch.full((700, 200), -128, dtype=torch.int8), torch.ones(200)
    assert torch.equal(run.quant_linear(x, weight, scale), ops.quant_linear(x, weight, scale))
    x, weight = randn(150, 700).float(), integers(700, 200, seed=4)
    assert torch.equal(run.quant_linear(x, weight, scale), ops.quant_linear(x, weight, scale))


@pytest.mark.parametrize(("M", "N", "K"), [(600, 896, 45), (300, 64, 6000)])
def test_products_of_many_rows_of_integers_are_the_references_bit_for_bit(run: ModuleType, M: int, N: int, K: int) -> None:
    """Rows that are read in parts and results that go past the caches, and more rows than stay in a cache."""
    x, weight, scale = 3 * randn(M, K), integers(K, N, seed=1), 1e-3 * randn(N, seed=2).float()
    assert torch.equal(run.quant_linear(x, weight, scale), ops.quant_linear(x, weight, scale))
    rounding = torch.tensor([0.031]), torch.tensor([-7.0])
    bias = torch.randint(-(2**20), 2**20, (N,), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    assert torch.equal(
        run.static_quant_linear(x, weight, scale, bias, *rounding), ops.static_quant_linear(x, weight, scale, bias, *rounding)
    )
