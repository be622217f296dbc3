"""lowering/cpp/experts_*.cpp with weights in panels, in every variant of the instruction sets that this machine runs."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.mixtures import mixture

from npucompile.graphs import ops
from npucompile.graphs.quantise import pack_w4, quantise_w4_values

BF16, I32, NAN = torch.bfloat16, torch.int32, float("nan")

ROUNDED = 2.0**-7
"""Relative to the largest sum of magnitudes: rows are rounded before the second product and at the end."""


@pytest.fixture(scope="module")
def run(variant: ModuleType) -> ModuleType:
    return variant


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def apart(x: torch.Tensor, by: int) -> torch.Tensor:
    """The same rows with `by` undefined elements between them."""
    wide = torch.full((len(x), x.shape[1] + by), NAN, dtype=x.dtype)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


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


def close(got: torch.Tensor, want: tuple[torch.Tensor, torch.Tensor]) -> None:
    total, size = want
    assert got.shape == total.shape
    assert got.isfinite().all(), "nothing that nobody wrote was read"
    assert (got.double() - total).abs().max() <= ROUNDED * size.max() + 1e-30


@settings(max_examples=40)
@given(
    st.integers(1, 64), st.integers(1, 3), st.integers(1, 9), st.integers(1, 40), st.integers(1, 40), st.integers(0, 3), st.integers(0, 9)
)
def test_experts_nobody_chose_are_not_read(run: ModuleType, T: int, X: int, E: int, F: int, M: int, by: int, seed: int) -> None:
    x, *rest = mixture(T, X, E, F, M, seed, BF16)
    close(run.experts_bf16(apart(x, by), *rest), wanted(x, *rest))


@pytest.mark.parametrize("sizes", [(2, 5, 7, 9), (3, 4, 72, 130)], ids=str)
def test_a_token_is_the_same_in_any_company(run: ModuleType, sizes: tuple[int, ...]) -> None:
    """Bit for bit; the larger sizes use a second thread, and experts with more rows than one block."""
    x, share, ids, *matrices = mixture(64, *sizes, dtype=BF16)
    alone = torch.cat([run.experts_bf16(x[t : t + 1], share[t : t + 1], ids[t : t + 1], *matrices) for t in range(64)])
    close(alone, wanted(x, share, ids, *matrices))
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
    st.sampled_from([BF16, torch.float32]),
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
