"""lowering/backends/inductor/native.py: the C++ kernels compute what the primitives compute, row by row, and are linked into packages."""

from __future__ import annotations

import multiprocessing
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.mixtures import mixture

from npucompile.graphs import native_ops as operators
from npucompile.graphs import ops
from npucompile.graphs.errors import LoweringError
from npucompile.graphs.ops.delta_gates import DeltaGates, delta_gates_reference
from npucompile.graphs.ops.sample import _kept_weights
from npucompile.graphs.step_inputs import NON_FINITE
from npucompile.lowering import isa
from npucompile.lowering.backends.inductor import aoti, native

F32, I32, NAN = torch.float32, torch.int32, float("nan")
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8}
"""Tolerance relative to the largest value; bf16 is rounded once, when results are stored."""

MANY = 60
"""Settings of a property test."""


@pytest.fixture(scope="module", params=["own", "narrow"])
def run(request: pytest.FixtureRequest, kernels: ModuleType) -> Iterator[ModuleType]:
    """The kernels, compiled for this machine, and for vectors half as wide without what goes beyond the level."""
    own = request.param == "own"
    with kernels.compiled_for(kernels.LEVELS[0 if own else -1]), kernels.limited(max(kernels.VARIANTS) if own else 0):
        yield kernels


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=I32)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float = TOLERANCE[F32]) -> None:
    assert got.shape == want.shape
    assert got.isfinite().all(), "nothing that nobody wrote was read"
    assert (got - want).abs().max() <= tolerance * want.abs().max() + 1e-30


def apart(x: torch.Tensor, by: int) -> torch.Tensor:
    """The same rows with `by` undefined floats between them."""
    wide = torch.full((len(x), x.shape[1] + by), NAN)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


COMPANIES = [(0, 1), (5, 2), (0, 3), (9, 4), (3, 5), (1, 8), (0, 9), (30, 17), (1, 63), (0, 64)]
"""First row and number of rows of calls with rows in common."""

# --- experts ---


@settings(max_examples=MANY)
@given(
    st.integers(1, 64), st.integers(1, 3), st.integers(1, 9), st.integers(1, 40), st.integers(1, 40), st.integers(0, 3), st.integers(0, 9)
)
def test_experts_are_the_reference_and_those_nobody_chose_are_not_read(run, T, X, E, F, M, by, seed):
    x, *rest = mixture(T, X, E, F, M, seed)
    close(run.experts(apart(x, by), *rest), ops.moe_experts(x, *rest), 4e-6)


@pytest.mark.parametrize("sizes", [(2, 5, 7, 9), (3, 8, 40, 130)], ids=str)
def test_a_token_of_experts_is_the_same_in_any_company(run, sizes):
    """The larger sizes use a second thread."""
    x, share, ids, *matrices = mixture(64, *sizes)
    alone = torch.cat([run.experts(x[t : t + 1], share[t : t + 1], ids[t : t + 1], *matrices) for t in range(64)])
    for threads in (1, 2):
        with run.threads(threads):
            for first, count in COMPANIES:
                rows = slice(first, first + count)
                assert torch.equal(run.experts(x[rows], share[rows], ids[rows], *matrices), alone[rows])
            assert torch.equal(run.experts(x.flip(0), share.flip(0), ids.flip(0), *matrices), alone.flip(0))


def test_a_token_of_nan_harms_no_other(run):
    x, *rest = mixture(9, 2, 4, 7, 9)
    want = run.experts(x, *rest)
    x[4] = NAN
    got = run.experts(x, *rest)
    assert got[4].isnan().all()
    assert torch.equal(got[[0, 1, 2, 3, 5, 6, 7, 8]], want[[0, 1, 2, 3, 5, 6, 7, 8]])


# --- gates: the exponential ---

GATES = [*(sign * 10.0**power for power in range(-30, 5) for sign in (-1, 1)), *(x / 4 for x in range(-360, 361)), float("inf")]


def test_gates_keep_their_digits_however_large_they_are(run):
    """Through a convolution of one tap, which is SiLU alone; 2^-100 is negligible beside any other value here."""
    x = torch.tensor(GATES)[None, None]
    got = run.conv(x, torch.ones(len(GATES), 1), torch.empty(1, 0, len(GATES)), ints([0]), ints([[0]]), ints([0]))
    torch.testing.assert_close(got.double(), torch.nn.functional.silu(x.double()), rtol=5e-7, atol=2.0**-100)


def test_nan_stays_nan_and_its_neighbours_what_they_are(run):
    x = randn(1, 1, 21)
    x[0, 0, [0, 7, 20]] = NAN
    got = run.conv(x, torch.ones(21, 1), torch.empty(1, 0, 21), ints([0]), ints([[0]]), ints([0]))
    torch.testing.assert_close(got, torch.nn.functional.silu(x), equal_nan=True)


# --- states in slots ---


def slots(B, Q, num_computed_tokens):
    """Even rows read slot 1 + b, odd ones a slot that they write; the first slot and others are unused."""
    write = ints(range(1 + B, 1 + B + B * Q)).view(B, Q)
    read = ints([int(write[b, Q // 2]) if b % 2 else 1 + b for b in range(B)])
    return 2 + B + B * Q, read, write, ints(num_computed_tokens)


def pool_for(read, num_computed_tokens, total, *shape, seed=5):
    """A pool of NaN except in slots that rows continue from."""
    pool = torch.full((total, *shape), NAN)
    live = read[num_computed_tokens > 0].long()
    pool[live] = randn(len(live), *shape, seed=seed)
    return pool


def convolution(B, Q, C, taps, num_computed_tokens):
    total, read, write, begins = slots(B, Q, num_computed_tokens)
    return randn(B, Q, C), randn(C, taps, seed=1), pool_for(read, begins, total, taps - 1, C), read, write, begins


CONVOLUTIONS = [
    *[(1, 1, 1, 2, [0]), (1, 1, 16, 4, [9]), (3, 4, 21, 4, [0, 3, 5]), (2, 8, 37, 3, [7, 0]), (4, 2, 50, 1, [1, 2, 0, 3])],
    (5, 3, 100, 4, [3, 0, 2, 8, 1]),
]


def stored(got, want, write):
    """The states in the written slots; checks that no other slot changed."""
    close(got[write.flatten().long()], want[write.flatten().long()])
    others = [i for i in range(len(got)) if i not in write.flatten().tolist()]
    assert torch.equal(got[others].view(I32), want[others].view(I32))


@pytest.mark.parametrize("case", [case for case in CONVOLUTIONS if case[3] > 1], ids=str)
def test_a_convolution_of_bfloat16_is_that_of_the_same_numbers_rounded(run, case):
    x, weight, pool, read, write, num_computed_tokens = convolution(*case)
    halves = x.bfloat16(), weight.bfloat16(), pool.bfloat16()
    wide = [tensor.float() for tensor in halves]
    want = run.conv(*wide, read, write, num_computed_tokens).bfloat16()
    assert torch.equal(run.conv(*halves, read, write, num_computed_tokens), want)
    assert torch.equal(halves[2].view(torch.int16), wide[2].bfloat16().view(torch.int16))


def rule(B, Q, Hk, H, Dk, Dv, num_computed_tokens):
    total, read, write, begins = slots(B, Q, num_computed_tokens)
    q, k = (torch.nn.functional.normalize(randn(B, Q, Hk, Dk, seed=seed), dim=-1) for seed in (1, 2))
    r = torch.Generator().manual_seed(3)
    g, beta = -torch.rand(B, Q, H, generator=r), torch.rand(B, Q, H, generator=r)
    return q, k, randn(B, Q, H, Dv, seed=4), g, beta, pool_for(read, begins, total, H, Dv, Dk), read, write, begins


RULES = [
    *[(1, 1, 1, 1, 1, 1, [0]), (1, 1, 1, 2, 16, 16, [4]), (3, 4, 2, 4, 17, 19, [0, 5, 2]), (2, 8, 1, 3, 5, 40, [1, 0])],
    (4, 4, 2, 4, 35, 37, [3, 0, 1, 9]),
]
"""Sizes B, Q, Hk, H, Dk, Dv and num_computed_tokens; the last uses a second thread."""


STATEFUL = [*(("conv", case) for case in CONVOLUTIONS), *(("delta", case) for case in RULES)]
MAKERS = {"conv": (convolution, 1, ops.causal_conv, (F32,)), "delta": (rule, 5, ops.gated_delta, ())}
"""Operands, how many of them are of tokens, the primitive, and what it takes besides."""


@pytest.mark.parametrize(("kind", "case"), [(kind, case) for kind, case in STATEFUL if kind == "delta" or case[3] > 1], ids=str)
def test_kernels_of_states_are_their_references(run, kind, case):
    make, _, primitive, more = MAKERS[kind]
    *operands, read, write, begins = make(*case)
    out, want_pool = primitive(*operands, read, write, begins, torch.full_like(begins, case[1]), *more)
    close(getattr(run, kind)(*operands, read, write, begins), out)
    stored(operands[-1], want_pool, write)


@pytest.mark.parametrize(("kind", "case"), STATEFUL, ids=str)
def test_kernels_of_states_are_the_same_alone_and_token_by_token(run, kind, case):
    make, count, *_ = MAKERS[kind]
    *operands, pool, read, write, begins = make(*case)
    tokens, fixed, kernel = operands[:count], operands[count:], getattr(run, kind)
    together = kernel(*operands, states := pool.clone(), read, write, begins)
    with run.threads(2):
        assert torch.equal(kernel(*operands, again := pool.clone(), read, write, begins), together)
    assert torch.equal(again.view(I32), states.view(I32))
    for b in range(case[0]):
        row, own = slice(b, b + 1), pool.clone()
        assert torch.equal(kernel(*(x[row] for x in tokens), *fixed, own, read[row], write[row], begins[row]), together[row])
        at = read[row]
        for t in range(case[1]):
            token = slice(t, t + 1)
            single = kernel(*(x[row, token] for x in tokens), *fixed, pool, at, write[row, token], begins[row] + t)
            assert torch.equal(single, together[row, token])
            at = write[row, t]
        used = write[b].long()
        assert torch.equal(own[used], states[used])
        assert torch.equal(pool[used], states[used])


@pytest.mark.parametrize("case", RULES, ids=str)
def test_the_delta_rule_of_bfloat16_is_that_of_the_same_numbers_rounded(run, case):
    q, k, v, g, beta, pool, *slots = rule(*case)
    halves, states = [tensor.bfloat16() for tensor in (q, k, v)], pool.clone()
    want = run.delta(*(half.float() for half in halves), g, beta, pool, *slots).bfloat16()
    assert torch.equal(run.delta(*halves, g, beta, states, *slots), want)
    assert torch.equal(states.view(I32), pool.view(I32))


def blanked(tensors, query_lens):
    """The tensors [B, Q, ...] with NaN behind the tokens of each row."""
    for x in tensors:
        for row, length in zip(x, query_lens, strict=True):
            row[length:] = NAN
    return tensors


LONG_ROWS = [
    *[((1, 1, 1, 1, 1, 1, [0]), [1]), ((2, 3, 1, 2, 16, 16, [4, 0]), [3, 2]), ((3, 9, 2, 4, 17, 19, [0, 5, 2]), [9, 0, 1])],
    ((4, 5, 2, 4, 35, 70, [3, 0, 1, 9]), [5, 1, 4, 0]),
]
"""As `RULES`, and how many tokens each row has; the last uses a second thread."""


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize(("case", "query_lens"), LONG_ROWS, ids=str)
def test_the_delta_rule_over_long_rows_is_the_reference(run, case, query_lens, half):
    (B, Q, Hk, H, *_), (q, k, v, g, beta, pool, read, write, begins) = case, rule(*case)
    # Keys and queries get their length in the kernel.
    raw, write = [3 * q, 0.5 * k, v.view(B, Q, Hk, -1)], write[:, :1].contiguous()
    a_log, dt_bias = randn(H, seed=10), randn(H, seed=11)
    qkv, ba = blanked([torch.cat(raw, -1), randn(B, Q, Hk, 2 * H // Hk, seed=9)], query_lens)
    lengths, dtype = ints(query_lens), torch.bfloat16 if half else torch.float32
    operands = qkv, ba.to(dtype), a_log, dt_bias, pool, read, write, begins, lengths, 1e-6, 1
    want, want_pool = ops.chunk_gated_delta(*operands)
    b, a = (part.reshape(B, Q, H).to(dtype) for part in ba.view(B, Q, Hk, 2, -1).unbind(3))
    g, beta = delta_gates_reference(DeltaGates(a, b, a_log, dt_bias))
    tokens = qkv, g.exp(), beta.float()
    with run.threads(2):
        out = run.delta_rows(*tokens, again := pool.clone(), read, write, begins, lengths, 1e-6, half)
    assert torch.equal(run.delta_rows(*tokens, pool, read, write, begins, lengths, 1e-6, half), out)
    assert torch.equal(again.view(I32), pool.view(I32))
    stored(pool, want_pool, write)
    for row, length in enumerate(query_lens):
        torch.testing.assert_close(out[row, :length], want[row, :length], rtol=1e-2 if half else 1e-4, atol=1e-3 if half else 1e-5)
        assert not out[row, length:].any()


LONG_CONVOLUTIONS = [
    *[(1, 3, 1, 2, [0], [3]), (2, 6, 5, 4, [3, 0], [1, 6]), (3, 40, 33, 4, [0, 2, 9], [40, 0, 2]), (2, 70, 64, 3, [5, 0], [70, 1])],
]
"""Sizes B, Q, C, taps, num_computed_tokens and query_lens."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", LONG_CONVOLUTIONS, ids=str)
def test_the_convolution_of_long_rows_is_the_reference(run, case, dtype):
    B, Q, C, taps, begins, query_lens = case
    total, read, write, starts = slots(B, Q, begins)
    write, lengths = write[:, :1].contiguous(), ints(query_lens)
    (x,), weight = blanked([randn(B, Q, C).to(dtype)], query_lens), randn(C, taps, seed=1).to(dtype)
    pool = pool_for(read, starts, total, taps - 1, C).to(dtype)
    want, want_pool = ops.causal_conv(x, weight, pool, read, write, starts, lengths, torch.float32)
    with run.threads(2):
        out = run.conv_rows(x, weight, again := pool.clone(), read, write, starts, lengths)
    assert torch.equal(run.conv_rows(x, weight, pool, read, write, starts, lengths), out)
    bits = I32 if dtype == torch.float32 else torch.int16
    assert torch.equal(pool.view(bits), again.view(bits))
    stored(pool.float(), want_pool.float(), write)
    for row, length in enumerate(query_lens):
        if length:
            close(out[row, :length], want[row, :length])
        assert not out[row, length:].any()


# --- attention ---


def attending(
    B: int, Q: int, H: int, G: int, D: int, P: int, num_computed_tokens: list[int], query_lens: list[int], dtype: torch.dtype, seed: int = 0
):
    """Queries, pools that are NaN wherever no live row may read, tables, num_computed_tokens and query_lens."""
    r = torch.Generator().manual_seed(seed)
    N = max(1, -(-max(s + Q for s in num_computed_tokens) // P))
    order = (1 + torch.randperm(B * N + 3, generator=r)).tolist()
    table = ints(order[: B * N]).view(B, N)
    pools = [torch.full((B * N + 4, P, G, D), NAN, dtype=dtype) for _ in range(2)]
    for b in range(B):
        for at in range(num_computed_tokens[b] + query_lens[b]):
            for pool in pools:
                pool[table[b, at // P], at % P] = torch.randn(G, D, generator=r).to(dtype)
    q = torch.randn(B, Q, H, D, generator=r).to(dtype)
    return q, *pools, table, ints(num_computed_tokens), ints(query_lens), D**-0.5


ATTENTIONS = [
    (1, 1, 4, 2, 64, 16, [60], [1]),
    (1, 4, 4, 2, 64, 16, [60], [4]),
    (3, 1, 2, 2, 5, 4, [0, 7, 30], [1, 1, 1]),
    (4, 4, 6, 2, 18, 8, [13, 0, 3, 8], [4, 4, 2, 1]),
    (2, 8, 3, 1, 16, 2, [1, 50], [8, 3]),
    (5, 2, 8, 4, 32, 16, [500, 400, 3, 0, 16], [2, 1, 2, 2, 1]),
    (2, 9, 8, 2, 128, 4, [70, 0], [9, 7]),
    (2, 40, 4, 1, 96, 32, [5, 90], [40, 33]),
    (1, 100, 4, 2, 128, 16, [150], [97]),
    (2, 1, 8, 2, 256, 16, [33, 130], [1, 1]),
    (3, 1, 6, 3, 96, 32, [15, 31, 200], [1, 1, 1]),
    (16, 4, 4, 2, 64, 16, [300 + i for i in range(16)], [4] * 16),
]
"""The last uses a second thread."""


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("case", ATTENTIONS, ids=str)
def test_attention_is_the_reference_for_every_valid_query(run, case, dtype):
    q, k, v, *rest = attending(*case, dtype)
    got, want = run.attention(q, k, v, *rest), ops.paged_attention(q.float(), k.float(), v.float(), *rest)
    assert got.dtype == dtype
    for b, length in enumerate(case[-1]):
        close(got[b, :length].float(), want[b, :length], TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_a_row_of_attention_is_the_same_in_every_batch(run, dtype):
    q, k, v, table, num_computed_tokens, query_lens, scale = attending(*ATTENTIONS[-1], dtype)
    for threads in (1, 2):
        with run.threads(threads):
            together = run.attention(q, k, v, table, num_computed_tokens, query_lens, scale)
        for b in range(0, 16, 5):
            row = slice(b, b + 1)
            assert torch.equal(run.attention(q[row], k, v, table[row], num_computed_tokens[row], query_lens[row], scale)[0], together[b])


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(
    "sizes",
    [(4, 4, 2, 64, 16), (40, 4, 2, 64, 16), (6, 8, 2, 128, 16), (3, 5, 5, 32, 32), (8, 6, 2, 18, 8), (3, 2, 2, 5, 4), (5, 3, 1, 33, 2)],
    ids=str,
)
def test_queries_of_one_token_and_of_several_say_the_same(run, sizes, dtype):
    """A candidate token attends to the same keys as in a step of its own."""
    Q = sizes[0]
    q, k, v, table, num_computed_tokens, query_lens, scale = attending(3, *sizes, [250, 3, 0], [Q] * 3, dtype)
    together = run.attention(q, k, v, table, num_computed_tokens, query_lens, scale)
    for t in range(Q):
        single = run.attention(q[:, t : t + 1], k, v, table, num_computed_tokens + t, torch.ones_like(query_lens), scale)
        assert torch.equal(single[:, 0], together[:, t])


def test_padding_rows_harm_nobody(run):
    q, k, v, table, num_computed_tokens, query_lens, scale = attending(3, 4, 4, 2, 64, 16, [60, 3, 9], [4, 4, 4], F32)
    want = run.attention(q, k, v, table, num_computed_tokens, query_lens, scale)
    table, num_computed_tokens, query_lens = table.clone(), num_computed_tokens.clone(), query_lens.clone()
    table[1], num_computed_tokens[1], query_lens[1] = 0, 0, 0
    got = run.attention(q, k, v, table, num_computed_tokens, query_lens, scale)
    assert torch.equal(got[[0, 2]], want[[0, 2]])


# --- tokens ---


@settings(max_examples=2 * MANY)
@given(st.lists(st.sampled_from([-1.0, 0.0, 2.0, NAN]), min_size=1, max_size=70))
def test_greedy_takes_the_first_of_the_largest_and_says_of_nan_that_it_is_no_number(run, logits):
    knobs = torch.zeros(1), ints([0]), torch.ones(1), torch.zeros(1), torch.zeros(1, 1)
    row = torch.tensor(logits)[None, None]
    want = NON_FINITE if any(x != x for x in logits) else logits.index(max(logits))
    assert run.sample(row, *knobs).item() == ops.sample(row, *knobs).item() == want


def knobs(B, seed):
    """Temperature, top_k, top_p and min_p; every other row sets none of the last three."""
    r = torch.Generator().manual_seed(seed)
    some = torch.arange(B) % 2 == 0
    top_k = torch.where(some, torch.randint(0, 20, (B,), generator=r), 0)
    top_p = torch.where(some, 0.2 + torch.rand(B, generator=r), 1.0).clamp(max=1.0)
    return 0.1 + 2 * torch.rand(B, generator=r), top_k.int(), top_p, torch.where(some, 0.2 * torch.rand(B, generator=r), 0.0)


DRAWS = [(1, 40), (5, 200), (17, 200), (100, 100), (2048, 30)]


@pytest.mark.parametrize(("V", "B"), DRAWS)
@pytest.mark.parametrize("seed", range(3))
def test_draws_are_the_reference_s_and_never_of_a_token_that_is_dropped(run, V, B, seed):
    """Except for random numbers that lie, up to rounding, on the boundary between two tokens."""
    logits, (temperature, *cuts) = 3 * randn(B, 4, V, seed=seed), knobs(B, seed)
    heat = (logits - logits.amax(-1, keepdim=True)).double() / temperature[:, None, None].double()
    masses = _kept_weights(heat, *(cut.double() for cut in cuts)).double()
    borders = masses.cumsum(-1) / masses.sum(-1, keepdim=True)
    drawn = torch.rand(B, 4, generator=torch.Generator().manual_seed(seed))
    differing = 0
    for uniform in (drawn, torch.zeros(B, 4), torch.full((B, 4), 1 - 2.0**-24)):
        got, want = (draw(logits, temperature, *cuts, uniform).long() for draw in (run.sample, ops.sample))
        assert (masses.gather(-1, got[..., None]) > 0).all()
        if uniform is drawn:
            nearest = (borders - uniform[..., None]).abs().amin(-1)
            assert (nearest[got != want] < 1e-6).all()
            differing = int((got != want).sum())
    assert differing <= 1


def test_draws_are_the_same_in_any_company(run):
    logits, cuts = randn(6, 4, 2048), knobs(6, 0)
    uniform = torch.rand(6, 4, generator=torch.Generator().manual_seed(1))
    together = run.sample(logits, *cuts, uniform)
    with run.threads(2):
        assert torch.equal(run.sample(logits, *cuts, uniform), together)
    for b in range(6):
        row = slice(b, b + 1)
        assert torch.equal(run.sample(logits[row], *(cut[row] for cut in cuts), uniform[row]), together[row])


@pytest.mark.parametrize("temperature", [1e-3, 1e-30])
def test_a_tiny_temperature_is_greedy(run, temperature):
    logits = randn(3, 2, 37)
    rows = torch.ones(3)
    got = run.sample(logits, rows * temperature, ints([0] * 3), rows, rows * 0, torch.full((3, 2), 0.999))
    assert torch.equal(got, logits.argmax(-1).int())


@settings(max_examples=MANY)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 70), st.integers(0, 9))
def test_log_probabilities_are_the_reference(run, B, Q, V, seed):
    r = torch.Generator().manual_seed(seed)
    logits, tokens = 5 * randn(B, Q, V, seed=seed), torch.randint(V, (B, Q), generator=r, dtype=I32)
    asked, most = torch.randint(2, (B,), generator=r, dtype=I32), 1 + seed % V
    logits[asked == 0] = NAN
    for got, want in zip(run.logprobs(logits, tokens, asked, most), ops.token_logprobs(logits, tokens, asked, most), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)


def test_of_equally_likely_tokens_the_lower_comes_first(run):
    logits = torch.tensor([[[0.0, 2.0, 2.0, -1e9, 2.0, 0.0]]])
    chosen, ids, values = run.logprobs(logits, ints([[3]]), ints([1]), 6)
    assert ids.tolist() == [[[1, 2, 4, 0, 5, 3]]]
    assert values[0, 0, 5] == chosen[0, 0] == -1e9


# --- the archive ---


def build(to: Path) -> Path:
    return native.archive(aoti.compiler()[0], aoti.instruction_set() or "native", to)


@pytest.mark.parametrize("names", [("conv",), ("conv", "shims")], ids=["kernel", "shims"])
@pytest.mark.short_cases("kernel")
def test_equal_sources_give_equal_bytes_and_are_compiled_once(tmp_path, monkeypatch, names):
    """Limits the sources to one kernel, and to that and the shims, which alone include torch's headers; both compile like the rest."""
    few = [path for path in native.sources() if path.stem in names]
    monkeypatch.setattr(native, "sources", lambda: few)
    first, second = build(tmp_path / "first"), build(tmp_path / "second")
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()
    assert str(tmp_path).encode() not in first.read_bytes()
    assert [path.name for path in first.parent.iterdir()] == [first.name]
    monkeypatch.setattr(native.subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    assert build(tmp_path / "first") == first


def test_processes_that_need_it_at_once_share_the_sources(tmp_path, monkeypatch):
    """Each is compiled once in all, by a compiler that notes what it is asked for."""
    few = [path for path in native.sources() if path.stem in ("conv", "cpu", "linear", "pack", "sample")]
    monkeypatch.setattr(native, "sources", lambda: few)
    compiler, asked = tmp_path / "compiler", tmp_path / "asked"
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {asked}\nexec {aoti.compiler()[0]} "$@"\n')
    compiler.chmod(0o755)
    level = aoti.instruction_set() or "native"
    others = [multiprocessing.get_context("fork").Process(target=native.archive, args=(str(compiler), level, tmp_path)) for _ in range(3)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert [other.exitcode for other in others] == [0, 0, 0]
    compiled = sorted(Path(word).stem for line in asked.read_text().splitlines() for word in line.split() if word.endswith(".cpp"))
    assert compiled == sorted(path.stem for path in few if path.suffix == ".cpp")
    assert [path.suffix for path in (tmp_path / "native").iterdir()] == [".a"]


def test_what_a_killed_compiler_left_is_not_used(tmp_path, monkeypatch):
    """A part of an object, and a lock that nobody holds any more, in the folder that processes share."""
    few = [path for path in native.sources() if path.stem == "conv"]
    monkeypatch.setattr(native, "sources", lambda: few)
    whole = build(tmp_path / "first")
    left = tmp_path / "second" / "native" / f"{whole.stem}.objects" / "killed"
    left.mkdir(parents=True)
    (left / "conv.o").write_bytes(b"a part")
    (left.parent / "conv.lock").touch()
    assert build(tmp_path / "second").read_bytes() == whole.read_bytes()


def test_whatever_changes_is_another_archive(tmp_path, monkeypatch):
    """A change of a source, of a header, of the set of files or of the flags changes the digest."""
    folder = Path(shutil.copytree(native.FOLDER, tmp_path / "cpp"))
    before = [native.digest()]
    monkeypatch.setattr(native, "FOLDER", folder)
    assert native.digest() == before[0]
    for name in ("linear.cpp", "vec.h", "more.cpp"):
        with (folder / name).open("a", encoding="utf-8") as file:
            file.write("\n// changed\n")
        before.append(native.digest())
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-g"))
    before.append(native.digest())
    assert len(set(before)) == 5


@pytest.mark.parametrize("level", ["default", "avx512_bf16"])
def test_kernels_have_the_variants_that_may_be_used_here(tmp_path, monkeypatch, level):
    few = [path for path in native.sources() if path.stem in ("cpu", "product_few")]
    monkeypatch.setattr(native, "sources", lambda: few)
    monkeypatch.setattr(isa, "in_use", lambda: level)
    names = subprocess.run(["nm", "--defined-only", build(tmp_path)], capture_output=True, text=True, check=True).stdout
    assert "npuc_limit" in names
    assert ("multiply_few" in names) is (level == "avx512_bf16" and "x86-64" in (aoti.instruction_set() or ""))


def test_a_tool_that_is_missing_is_named(tmp_path):
    with pytest.raises(
        LoweringError, match=r"the kernels need no-such-compiler, which is not here; on Debian: apt-get install g\+\+ binutils"
    ):
        native.archive("no-such-compiler", "x86-64", tmp_path)
    assert not list(tmp_path.rglob("*.a"))


def test_a_source_that_does_not_compile_says_why_and_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "wrong.cpp").write_text("int main( {\n")
    monkeypatch.setattr(native, "sources", lambda: [tmp_path / "wrong.cpp"])
    with pytest.raises(LoweringError, match=r"could not compile the kernels: .*wrong\.cpp:1"):
        build(tmp_path / "cache")
    assert not list((tmp_path / "cache" / "native").iterdir())


def test_arithmetic_stays_as_it_is_written():
    """No flag or attribute lets a compiler reorder sums, ignore NaN or flush denormals."""
    assert not [flag for flag in native.FLAGS if "math" in flag or flag == "-Ofast"]
    assert not [path.name for path in native.sources() if re.search(r"fast.?math|pragma\s+GCC\s+optimize|reduction\(", path.read_text())]


def signatures(text: str) -> list[tuple[str, list[str]]]:
    """Names and argument types of the C functions that a text declares."""
    declarations = re.findall(r"AOTITorchError (\w+)\(([^)]*)\)", re.sub(r"\s+", " ", text))
    return sorted((name, [argument.rsplit(" ", 1)[0].strip() for argument in arguments.split(",")]) for name, arguments in declarations)


def test_the_shims_define_what_packages_are_told_they_define():
    declared, text = native.shims(), (native.FOLDER / f"{native.SHIMS}.cpp").read_text()
    ours = {single.op: name for name, single in operators.TABLE.items() if name.startswith("npuc_")}
    assert set(ours) <= set(declared)
    assert signatures(text[text.index('extern "C"') :]) == signatures("\n".join(declared[op][0] for op in ours))
    assert all(f"aoti_torch_cpu_{name}(" in declared[op][0] for op, name in ours.items())
