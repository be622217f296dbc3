"""lowering/cpp: products and experts with weights in panels, in every variant of the instruction sets that this machine runs."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.mixtures import mixture

from npucompile.graphs import ops
from npucompile.graphs.quantise import pack_w4, quantise_w4_values

BF16, F32, I32, NAN = torch.bfloat16, torch.float32, torch.int32, float("nan")
DTYPES = st.sampled_from([BF16, F32])

ROUNDED = {BF16: 2.0**-8, F32: 4e-6}
"""Relative to the largest value: results are rounded once, when they are stored, and float32 is summed in another order."""
ROUNDED_TWICE = 2.0**-7
"""Relative to the largest sum of magnitudes: rows of experts are rounded before the second product and at the end."""


@pytest.fixture(scope="module")
def run(variant: ModuleType) -> ModuleType:
    return variant


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def integers(*shape: int, seed: int = 3, low: int = -8) -> torch.Tensor:
    return torch.randint(low, -low, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


def apart(x: torch.Tensor, by: int) -> torch.Tensor:
    """The same rows with `by` undefined elements between them."""
    wide = torch.full((len(x), x.shape[1] + by), NAN, dtype=x.dtype)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert got.isfinite().all(), "nothing that nobody wrote was read"
    assert (got.double() - want).abs().max() <= ROUNDED[got.dtype] * want.abs().max() + 1e-30


def same_in_any_company(run: ModuleType, product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """All rows at once; fails unless each has the same bits whatever blocks rows are cut into, and with two threads."""
    whole = product(x)
    for threads in (1, 2):
        with run.threads(threads):
            for count in (*range(1, 35), 47, 64, 65, 130):
                assert torch.equal(product(x[3 : 3 + count]), whole[3 : 3 + count])
    return whole


# --- float32, bfloat16 and int8 ---


@settings(max_examples=60)
@given(st.integers(1, 65), st.integers(1, 90), st.integers(1, 300), st.integers(0, 5), DTYPES)
def test_the_product_is_that_of_wider_numbers(run: ModuleType, M: int, N: int, K: int, by: int, dtype: torch.dtype) -> None:
    x, weight = randn(M, K, dtype=dtype), randn(N, K, seed=1, dtype=dtype)
    close(run.linear(apart(x, by), weight), x.double() @ weight.double().T)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize(("N", "K"), [(1, 1), (33, 17), (200, 300), (48, 4200), (64, 1030), (1792, 40)])
def test_a_row_is_the_same_in_any_company(run: ModuleType, N: int, K: int, dtype: torch.dtype) -> None:
    """Bit for bit, whatever blocks rows are cut into: a request's tokens must not depend on other rows or on the number of threads.

    With 4,200 columns 300 rows are more than stay in the cache at a time, with 1,030 sums are put down on the way, and results of 1,792
    channels are more than caches should hold.
    """
    x, weight = randn(300, K, dtype=dtype), randn(N, K, seed=1, dtype=dtype)
    close(same_in_any_company(run, lambda rows: run.linear(rows, weight), x), x.double() @ weight.double().T)


def test_long_sums_of_float32_round_as_little_as_those_of_torch(run: ModuleType) -> None:
    """Within twice torch's largest error: numbers of one sign, of which a sum one by one loses ten times as much."""
    x, weight = randn(40, 6000, dtype=F32).abs(), randn(48, 6000, seed=1, dtype=F32).abs()
    want = x.double() @ weight.double().T
    assert (run.linear(x, weight) - want).abs().max() <= 2 * (x @ weight.T - want).abs().max()


@settings(max_examples=30)
@given(st.integers(1, 70), st.integers(1, 90), st.integers(1, 70), st.sampled_from([torch.int32, torch.int64]), DTYPES)
def test_rows_are_picked_out_of_panels_as_they_were(
    run: ModuleType, V: int, M: int, T: int, integer: torch.dtype, dtype: torch.dtype
) -> None:
    table = randn(V, M, dtype=dtype)
    tokens = torch.randint(V, (T,), generator=torch.Generator().manual_seed(1)).to(integer)
    assert torch.equal(run.embed(tokens, table), table[tokens.long()])


@settings(max_examples=60)
@given(st.integers(1, 65), st.integers(1, 90), st.integers(1, 300), st.integers(0, 5), DTYPES)
def test_products_of_integers_are_the_references_bit_for_bit(run: ModuleType, M: int, N: int, K: int, by: int, dtype: torch.dtype) -> None:
    x, weight, scale = 3 * randn(M, K).to(dtype), integers(K, N, seed=1, low=-128), 1e-3 * randn(N, seed=2).float()
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
    x, weight = randn(150, 700).float(), integers(700, 200, seed=4, low=-128)
    assert torch.equal(run.quant_linear(x, weight, scale), ops.quant_linear(x, weight, scale))


@pytest.mark.parametrize(("M", "N", "K"), [(600, 896, 45), (300, 64, 6000)])
def test_products_of_many_rows_of_integers_are_the_references_bit_for_bit(run: ModuleType, M: int, N: int, K: int) -> None:
    """Rows that are read in parts and results that go past the caches, and more rows than stay in a cache."""
    x, weight, scale = 3 * randn(M, K), integers(K, N, seed=1, low=-128), 1e-3 * randn(N, seed=2).float()
    assert torch.equal(run.quant_linear(x, weight, scale), ops.quant_linear(x, weight, scale))
    rounding = torch.tensor([0.031]), torch.tensor([-7.0])
    bias = torch.randint(-(2**20), 2**20, (N,), generator=torch.Generator().manual_seed(3), dtype=torch.int32)
    assert torch.equal(
        run.static_quant_linear(x, weight, scale, bias, *rounding), ops.static_quant_linear(x, weight, scale, bias, *rounding)
    )


# --- int4 ---


def product(x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The product in float64, with scales in the dtype of x."""
    weights = values.double().unflatten(0, (len(scale), -1)) * scale.to(x.dtype).double()[:, None]
    return x.double() @ weights.flatten(0, 1)


@settings(max_examples=60)
@given(st.integers(1, 65), st.integers(1, 12), st.integers(1, 130), st.integers(0, 5), DTYPES)
def test_a_scale_of_a_channel(run: ModuleType, M: int, eights: int, K: int, by: int, dtype: torch.dtype) -> None:
    x, values, scale = randn(M, K, dtype=dtype), integers(K, 8 * eights), 0.1 * randn(1, 8 * eights, seed=2, dtype=F32)
    x[0] = 0
    got = run.linear_int4(apart(x, by), pack_w4(values), scale)
    close(got, product(x, values, scale))
    assert not got[0].any()


@settings(max_examples=60)
@given(st.integers(1, 65), st.integers(1, 12), st.integers(1, 4), st.integers(1, 5), DTYPES)
def test_a_scale_of_each_group(run: ModuleType, M: int, eights: int, tiles: int, groups: int, dtype: torch.dtype) -> None:
    K, N = 32 * tiles * groups, 8 * eights
    x, values, scale = randn(M, K, dtype=dtype), integers(K, N), 0.1 * randn(groups, N, seed=2, dtype=F32)
    close(run.linear_int4(x, pack_w4(values), scale), product(x, values, scale))


def test_int4_is_exact_where_nothing_is_rounded(run: ModuleType) -> None:
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
def test_a_row_of_int4_is_the_same_in_any_company(run: ModuleType, N: int, K: int, groups: int, dtype: torch.dtype) -> None:
    """Bit for bit, whatever blocks rows are cut into; with 4,224 columns 300 rows are more than stay in the cache at a time."""
    x, values, scale = randn(300, K, dtype=dtype), integers(K, N), 0.1 * randn(groups, N, seed=2, dtype=F32)
    weight = pack_w4(values)
    close(same_in_any_company(run, lambda rows: run.linear_int4(rows, weight, scale), x), product(x, values, scale))


def test_no_rows_have_no_result(run: ModuleType) -> None:
    assert run.linear_int4(torch.zeros(0, 64, dtype=BF16), pack_w4(integers(64, 16)), torch.ones(2, 16)).shape == (0, 16)


def test_nan_and_infinity_stay_in_their_row(run: ModuleType) -> None:
    x, weight, scale = randn(4, 64, dtype=F32), pack_w4(integers(64, 16)), torch.ones(2, 16)
    want = run.linear_int4(x, weight, scale)
    x[1, 5], x[2, 40] = float("nan"), float("inf")
    got = run.linear_int4(x, weight, scale)
    assert not got[1:3].isfinite().any()
    assert torch.equal(got[[0, 3]], want[[0, 3]])


# --- experts ---


def wanted(
    x: torch.Tensor, share: torch.Tensor, ids: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum in float64, choice by choice, and the same sum of the magnitudes of what is added."""
    total, size = torch.zeros(x.shape, dtype=torch.float64), torch.zeros(x.shape, dtype=torch.float64)
    for t, c in ((ids >= 0) & (ids < len(down))).nonzero().tolist():
        e = int(ids[t, c])
        gate, up = (gate_up[e].double() @ x[t].double()).unbind()
        hidden = torch.nn.functional.silu(gate) * up
        total[t] += share[t, c].double() * (down[e].double() @ hidden)
        size[t] += share[t, c].double() * (down[e].double().abs() @ hidden.abs())
    return total, size


def close_sums(got: torch.Tensor, want: tuple[torch.Tensor, torch.Tensor]) -> None:
    total, size = want
    assert got.shape == total.shape
    assert got.isfinite().all(), "nothing that nobody wrote was read"
    assert (got.double() - total).abs().max() <= ROUNDED_TWICE * size.max() + 1e-30


@settings(max_examples=40)
@given(
    st.integers(1, 64), st.integers(1, 3), st.integers(1, 9), st.integers(1, 40), st.integers(1, 40), st.integers(0, 3), st.integers(0, 9)
)
def test_experts_nobody_chose_are_not_read(run: ModuleType, T: int, X: int, E: int, F: int, M: int, by: int, seed: int) -> None:
    x, *rest = mixture(T, X, E, F, M, seed, BF16)
    close_sums(run.experts_bf16(apart(x, by), *rest), wanted(x, *rest))


@pytest.mark.parametrize("sizes", [(2, 5, 7, 9), (3, 4, 72, 130)], ids=str)
def test_a_token_of_experts_is_the_same_in_any_company(run: ModuleType, sizes: tuple[int, ...]) -> None:
    """Bit for bit; the larger sizes use a second thread, and experts with more rows than one block."""
    x, share, ids, *matrices = mixture(64, *sizes, dtype=BF16)
    alone = torch.cat([run.experts_bf16(x[t : t + 1], share[t : t + 1], ids[t : t + 1], *matrices) for t in range(64)])
    close_sums(alone, wanted(x, share, ids, *matrices))
    for threads in (1, 2):
        with run.threads(threads):
            for first, count in ((5, 2), (9, 4), (3, 9), (30, 17), (0, 33), (0, 64)):
                rows = slice(first, first + count)
                assert torch.equal(run.experts_bf16(x[rows], share[rows], ids[rows], *matrices), alone[rows])


def test_tokens_of_other_ranks_experts_get_nothing(run: ModuleType) -> None:
    x, share, _, gate_up, down = mixture(3, 2, 4, 20, 24, dtype=BF16)
    nobody = torch.full((3, 2), 4, dtype=I32)
    assert not run.experts_bf16(x, share, nobody, gate_up, down).any()
    assert run.experts_bf16(x[:0], share[:0], nobody[:0], gate_up, down).shape == (0, 24)


def grouped(counts: list[int], more: int, F: int, M: int, group: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Rows grouped by expert, and `more` of none, which are NaN; so are the scales of experts without rows."""
    weights = []
    for i, (K, N) in enumerate(((M, 2 * F), (F, M))):
        values, scale = quantise_w4_values(randn(len(counts), K, N, seed=i).float(), group)
        scale[[e for e, count in enumerate(counts) if count == 0]] = NAN
        weights += [pack_w4(values), scale]
    rows = randn(sum(counts) + more, M, seed=4).to(dtype)
    rows[sum(counts) :] = NAN
    return rows, torch.tensor(counts), *weights


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=5),
    st.integers(0, 3),
    st.sampled_from([(4, 8, 0), (12, 40, 0), (32, 64, 32), (64, 32, 32), (128, 192, 64)]),
    DTYPES,
)
def test_int4_experts_are_the_reference_on_their_rows(
    run: ModuleType, counts: list[int], more: int, sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    operands = grouped(counts, more, *sizes, dtype)
    got, own = run.grouped_int4(*operands), sum(counts)
    assert got.shape == operands[0].shape
    assert not got[own:].any()
    # The reference in float32 rounds nothing that the kernel keeps, but scales, which these hold in float16.
    want = ops.grouped_experts_w4a16(operands[0].float(), *operands[1:])
    assert got[:own].isfinite().all(), "nothing that nobody wrote was read"
    if own:
        assert (got - want)[:own].abs().max() <= (2.0**-6 if dtype == BF16 else 1e-5) * want[:own].abs().max()


def test_a_row_of_int4_experts_is_the_same_in_any_company(run: ModuleType) -> None:
    for dtype in (BF16, torch.float32):
        rows, counts, *weights = grouped([40, 0, 3, 17], 0, 128, 192, 64, dtype)
        whole = run.grouped_int4(rows, counts, *weights)
        for threads in (1, 2):
            with run.threads(threads):
                for first, few in ((0, [1, 0, 0, 0]), (39, [1, 0, 3, 5]), (40, [0, 0, 2, 0]), (43, [0, 0, 0, 17])):
                    part = slice(first, first + sum(few))
                    assert torch.equal(run.grouped_int4(rows[part], torch.tensor(few), *weights), whole[part])


def rounded(counts: list[int], more: int, F: int, M: int, sign: int = 1) -> tuple[torch.Tensor, ...]:
    """Rows of int8 grouped by expert; the scales of experts without rows are NaN. Rows and gates have one sign where `sign` is 0."""
    r, E, R = torch.Generator().manual_seed(F), len(counts), sum(counts) + more
    rows = torch.randint(-127 * sign, 128, (R, M), generator=r, dtype=torch.int8)
    gate = torch.randint(-127 * sign, 128, (E, M, F), generator=r, dtype=torch.int8)
    up, down = (torch.randint(-128, 128, shape, generator=r, dtype=torch.int8) for shape in ((E, M, F), (E, F, M)))
    scales = torch.rand(R, generator=r) + 0.5, torch.rand(E, 2 * F, generator=r) / 8192, torch.rand(E, M, generator=r) / 64
    for scale in scales[1:]:
        scale[[e for e, count in enumerate(counts) if count == 0]] = NAN
    return rows, scales[0], torch.tensor(counts), torch.cat([gate, up], -1), scales[1], down, scales[2]


COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=5)


@settings(max_examples=40)
@given(COUNTS, st.integers(0, 3), st.integers(1, 70), st.integers(8, 90), st.booleans())
def test_int8_experts_are_the_reference(run: ModuleType, counts: list[int], more: int, F: int, M: int, half: bool) -> None:
    """Up to a last bit of the exponential, which may round a number of the rows in between to its neighbour."""
    operands, dtype = rounded(counts, more, F, M), BF16 if half else torch.float32
    got, want = run.grouped_int8(*operands, int(half)), ops.grouped_experts_w8a8(*operands, dtype)
    assert got.dtype == want.dtype
    assert got.isfinite().all(), "nothing that nobody wrote was read"
    apart = (got.double() - want.double()).abs().amax(-1)
    assert (apart <= 0.02 * want.double().abs().amax(-1) + 1e-30).all()


@settings(max_examples=40)
@given(COUNTS, st.integers(1, 70), st.integers(8, 90), st.booleans())
def test_int8_experts_are_bit_for_bit_the_reference_where_gates_are_open(
    run: ModuleType, counts: list[int], F: int, M: int, half: bool
) -> None:
    """Gates so large that their SiLU is themselves: all that is left is integers and scales."""
    rows, row_scale, counts_, gate_up, *rest = rounded(counts, 2, F, M, sign=0)
    gate_up_scale = torch.rand(len(counts), 2 * F, generator=torch.Generator().manual_seed(1)) + 1
    rows, gate_up[:, :, :F] = rows.clamp(min=1), gate_up[:, :, :F].clamp(min=3)
    operands = rows, row_scale, counts_, gate_up, gate_up_scale, *rest[1:]
    assert torch.equal(run.grouped_int8(*operands, int(half)), ops.grouped_experts_w8a8(*operands, BF16 if half else torch.float32))


# --- what a wrong kernel would give is seen, in every variant ---

MUTANTS = {
    "a lost tail": lambda x, values, scale: (x.index_fill(1, torch.tensor([x.shape[1] - 1]), 0), values, scale),
    "a wrong scale": lambda x, values, scale: (x, values, scale * 1.02),
    "a swapped row": lambda x, values, scale: (x[[1, 0, *range(2, len(x))]], values, scale),
    "a dropped group": lambda x, values, scale: (x, values, torch.cat([torch.zeros_like(scale[:1]), scale[1:]])),
}
PRODUCTS = {
    "bf16": lambda run, x, values, scale: run.linear(x, widened(values, scale).t().contiguous()),
    "f32": lambda run, x, values, scale: run.linear(x.float(), widened(values, scale).t().float().contiguous()),
    "int8": lambda run, x, values, scale: run.quant_linear(x, values, scale[0]),
    "int4": lambda run, x, values, scale: run.linear_int4(x, pack_w4(values), scale),
}


def widened(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (values.float().unflatten(0, (len(scale), -1)) * scale[:, None]).flatten(0, 1).to(BF16)


@pytest.mark.parametrize("rows", [2, 5, 17])
@pytest.mark.parametrize(("kind", "mutant"), [(k, m) for k in PRODUCTS for m in MUTANTS if (k, m) != ("int8", "a dropped group")])
def test_each_wrong_kernel_is_found(run: ModuleType, kind: str, mutant: str, rows: int) -> None:
    groups = 1 if kind == "int8" else 4
    # Powers of two, so that bfloat16 has all weights exactly.
    x, values, scale = randn(rows, 128), integers(128, 24), torch.full((groups, 24), 0.125)
    want = {"int8": lambda: ops.quant_linear(x, values, scale[0]).double()}.get(kind, lambda: product(x, values, scale))()
    close(PRODUCTS[kind](run, x, values, scale), want)
    with pytest.raises(AssertionError):
        close(PRODUCTS[kind](run, *MUTANTS[mutant](x, values, scale)), want)
