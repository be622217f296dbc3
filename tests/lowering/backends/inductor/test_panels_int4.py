"""lowering/cpp/linear_int4.cpp and its products: every variant of the instruction sets that this machine runs."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npucompile.graphs import ops
from npucompile.graphs.quantise import pack_w4

BF16, F32 = torch.bfloat16, torch.float32

ROUNDED = {BF16: 2.0**-8, F32: 4e-6}
"""Relative to the largest value: results are rounded once, when they are stored, and float32 is summed in another order."""

DTYPES = st.sampled_from([BF16, F32])


@pytest.fixture(scope="module")
def run(variant: ModuleType) -> ModuleType:
    return variant


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(K: int, N: int) -> torch.Tensor:
    return torch.randint(-8, 8, (K, N), generator=torch.Generator().manual_seed(3), dtype=torch.int8)


def apart(x: torch.Tensor, by: int) -> torch.Tensor:
    """The same rows with `by` undefined elements between them."""
    wide = torch.full((len(x), x.shape[1] + by), float("nan"), dtype=x.dtype)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def wanted(x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The product in float64, with scales in the dtype of x."""
    weights = values.double().unflatten(0, (len(scale), -1)) * scale.to(x.dtype).double()[:, None]
    return x.double() @ weights.flatten(0, 1)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert got.isfinite().all(), "nothing that nobody wrote was read"
    assert (got.double() - want).abs().max() <= ROUNDED[got.dtype] * want.abs().max() + 1e-30


@settings(max_examples=60)
@given(st.integers(1, 65), st.integers(1, 12), st.integers(1, 130), st.integers(0, 5), DTYPES)
def test_a_scale_of_a_channel(run: ModuleType, M: int, eights: int, K: int, by: int, dtype: torch.dtype) -> None:
    x, values, scale = randn(M, K).to(dtype), integers(K, 8 * eights), 0.1 * randn(1, 8 * eights, seed=2)
    x[0] = 0
    got = run.linear_int4(apart(x, by), pack_w4(values), scale)
    close(got, wanted(x, values, scale))
    assert not got[0].any()


@settings(max_examples=60)
@given(st.integers(1, 65), st.integers(1, 12), st.integers(1, 4), st.integers(1, 5), DTYPES)
def test_a_scale_of_each_group(run: ModuleType, M: int, eights: int, tiles: int, groups: int, dtype: torch.dtype) -> None:
    K, N = 32 * tiles * groups, 8 * eights
    x, values, scale = randn(M, K).to(dtype), integers(K, N), 0.1 * randn(groups, N, seed=2)
    close(run.linear_int4(x, pack_w4(values), scale), wanted(x, values, scale))


def test_integers_are_exact(run: ModuleType) -> None:
    """Small integers and scales that are powers of two: nothing is rounded, so every bit is that of the reference."""
    for K, groups in ((96, 3), (77, 1)):
        values, scale = integers(K, 40), torch.tensor([0.25, 2.0]).repeat(groups, 20)
        for M in (1, 3, 16, 17, 40):
            x = torch.randint(-3, 4, (M, K), generator=torch.Generator().manual_seed(M)).float()
            want = ops.weight_quant_linear(x, pack_w4(values), scale)
            assert torch.equal(run.linear_int4(x, pack_w4(values), scale), want)
            assert torch.equal(run.linear_int4(x.to(BF16), pack_w4(values), scale), want.to(BF16))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize(("N", "K", "groups"), [(8, 32, 1), (200, 320, 5), (48, 4224, 33)])
def test_a_row_is_the_same_in_any_company(run: ModuleType, N: int, K: int, groups: int, dtype: torch.dtype) -> None:
    """Bit for bit, whatever blocks rows are cut into; with 4,224 columns 300 rows are more than stay in the cache at a time."""
    x, values, scale = randn(300, K).to(dtype), integers(K, N), 0.1 * randn(groups, N, seed=2)
    weight = pack_w4(values)
    whole = run.linear_int4(x, weight, scale)
    close(whole, wanted(x, values, scale))
    for threads in (1, 2):
        with run.threads(threads):
            for count in (*range(1, 35), 47, 64, 65, 130):
                assert torch.equal(run.linear_int4(x[3 : 3 + count], weight, scale), whole[3 : 3 + count])


def test_no_rows_have_no_result(run: ModuleType) -> None:
    assert run.linear_int4(torch.zeros(0, 64, dtype=BF16), pack_w4(integers(64, 16)), torch.ones(2, 16)).shape == (0, 16)


def test_nan_and_infinity_stay_in_their_row(run: ModuleType) -> None:
    x, weight, scale = randn(4, 64), pack_w4(integers(64, 16)), torch.ones(2, 16)
    want = run.linear_int4(x, weight, scale)
    x[1, 5], x[2, 40] = float("nan"), float("inf")
    got = run.linear_int4(x, weight, scale)
    assert not got[1:3].isfinite().any()
    assert torch.equal(got[[0, 3]], want[[0, 3]])
