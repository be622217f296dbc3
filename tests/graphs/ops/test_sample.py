"""graphs/ops/sample.py: probabilities of sampled tokens are exactly those that temperature, top-k, top-p and min-p define."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from npucompile.graphs import ops
from npucompile.graphs.ops.sample import part_length
from npucompile.graphs.steps.inputs import MAX_RANKED, NON_FINITE, UNDECIDED

GRID = 4096


def masses(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """Probability of every id by definition, in f64; skips examples where rounding could decide what top_p keeps."""
    if temperature == 0:
        return [float(i == logits.index(max(logits))) for i in range(len(logits))]
    heat = [math.exp((x - max(logits)) / temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    ranked = order[:top_k] if top_k > 0 else order
    total, nucleus, reached = sum(heat[i] for i in ranked), [], 0.0
    for i in ranked:
        assume(top_p >= 1 or abs(reached - top_p) > 1e-5)
        if reached >= top_p < 1 and nucleus:
            break
        nucleus.append(i)
        reached += heat[i] / total
    assume(all(abs(h - min_p) > 1e-5 or h == 1 for h in heat))
    nucleus = [i for i in nucleus if heat[i] >= min_p]
    total = sum(heat[i] for i in nucleus)
    return [heat[i] / total if i in nucleus else 0.0 for i in range(len(logits))]


def draws(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, uniform: torch.Tensor) -> torch.Tensor:
    """Tokens [n] sampled with n random numbers."""
    knobs = (torch.tensor([x]) for x in (temperature, top_k, top_p, min_p))
    temperatures, ks, ps, mins = (x.int() if i == 1 else x.float() for i, x in enumerate(knobs))
    rows = torch.tensor(logits).expand(1, len(uniform), -1)
    return ops.sample(rows, temperatures, ks, ps, mins, uniform[None])[0]


LOGITS = st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=1, max_size=7)
KNOBS = (
    st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    st.integers(-1, 8),
    st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
    st.one_of(st.just(0.0), st.floats(0.01, 1.0)),
)


@given(LOGITS, *KNOBS)
@example([0.0, 0.0, 0.0, 0.0], 1.0, 2, 1.0, 0.0)
@example([0.0, 1.0, 1.0, 0.0], 1.0, 0, 0.3, 0.0)
@example([1.0, 3.0, 3.0], 0.0, 1, 0.1, 1.0)
def test_masses_are_exact(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    want = masses(logits, temperature, top_k, top_p, min_p)
    tokens = draws(logits, temperature, top_k, top_p, min_p, torch.arange(GRID) / GRID)
    assert tokens.tolist() == sorted(tokens.tolist()) or temperature == 0, "ids cover the unit interval in order"
    for token, mass in enumerate(want):
        count = int((tokens == token).sum())
        assert abs(count - mass * GRID) < 1.01, f"id {token}: {count / GRID} of the draws, its mass is {mass}"
        assert count == 0 or mass > 0


@given(LOGITS, *KNOBS)
def test_no_random_number_picks_a_dropped_token(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    want = masses(logits, temperature, top_k, top_p, min_p)
    for u in (0.0, 1 - 2**-24):
        (token,) = draws(logits, temperature, top_k, top_p, min_p, torch.tensor([u])).tolist()
        assert want[token] > 0


@pytest.mark.parametrize("top_p", [1.0, 0.999])
def test_a_large_vocabulary_keeps_its_tail(top_p: float) -> None:
    """The last of 100,000 equal tokens is reachable, and at top_p just under 1 a thousandth of them is not."""
    V = 100_000
    u = torch.tensor([0.0, 0.5, 1 - 2**-24])
    tokens = draws([0.0] * V, 1.0, 0, top_p, 0.0, u).tolist()
    assert tokens[0] == 0
    assert tokens[1] == pytest.approx(V * top_p / 2, abs=2)
    assert tokens[2] == pytest.approx(V * top_p - 1, abs=2 if top_p == 1 else V / 1000)


def test_top_p_of_one_keeps_what_rounding_cannot_see() -> None:
    """A token 20 nats less likely than another has a probability below the f32 epsilon, and is still sampled."""
    assert draws([0.0, 20.0], 1.0, 2, 1.0, 0.0, torch.tensor([0.0, 1e-8])).tolist() == [0, 1]
    assert draws([0.0, 20.0], 1.0, 2, 0.99, 0.0, torch.tensor([0.0, 1e-8])).tolist() == [1, 1]


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    assert draws([1.0, 2.0, 2.0, 0.0], 0.0, 0, 1.0, 0.0, torch.tensor([0.99])).tolist() == [1]


# --- the lowering for NPUs, which ranks a few of the tokens only and sums in f32 ---

K = MAX_RANKED
LOWERED = ops.sample.lower_for("npu")


def intervals(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Ends [V] of each token's share of the unit interval, in f64; a share is empty where the token is dropped."""
    order = logits.double().argsort(descending=True, stable=True)
    if temperature == 0:
        return (torch.arange(len(logits)) >= order[0]).double()
    heat = ((logits.double() - logits.max()) / temperature).exp()
    ranked = heat[order]
    kept = torch.arange(len(logits)) < (top_k or len(logits))
    share = torch.where(kept, ranked, 0.0) / ranked[kept].sum()
    kept &= (share.cumsum(0) - share < top_p) | torch.tensor(top_p >= 1)
    weights = torch.where(torch.zeros(len(logits), dtype=torch.bool).scatter(0, order, kept) & (heat >= min_p), heat, 0.0)
    return (weights / weights.sum()).cumsum(0)


def check_lowered(logits: torch.Tensor, knobs: tuple[float, int, float, float], uniform: torch.Tensor) -> None:
    """Each draw is the token in whose share the random number lies, to within f32 rounding, and never a dropped one."""
    temperature, top_k, top_p, min_p = knobs
    columns = (torch.tensor([temperature]), torch.tensor([top_k], dtype=torch.int32), torch.tensor([top_p]), torch.tensor([min_p]))
    tokens = LOWERED(logits.expand(1, len(uniform), -1), *columns, uniform[None])[0]
    assert tokens.dtype == torch.int32
    ends = intervals(logits, *knobs)
    starts = torch.cat([torch.zeros(1, dtype=torch.float64), ends[:-1]])
    assert (ends > starts)[tokens].all(), "a dropped token was drawn"
    if temperature > 0:
        assert ((starts[tokens] - 2e-6 <= uniform) & (uniform <= ends[tokens] + 2e-6)).all()


UNIFORM = torch.cat([torch.tensor([0.0, 1 - 2**-24]), torch.rand(30, generator=torch.Generator().manual_seed(3))])


@given(LOGITS, *KNOBS)
@example([0.0, 0.0, 0.0, 0.0], 1.0, 2, 1.0, 0.0)
@example([1.0, 3.0, 3.0], 0.0, 1, 0.1, 1.0)
def test_lowered_draws_are_those_of_a_small_vocabulary(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    masses(logits, temperature, top_k, top_p, min_p)
    check_lowered(torch.tensor(logits), (temperature, max(top_k, 0), top_p, min_p), UNIFORM)


LARGE = 3 * K + 64
SHAPES = {
    "flat": lambda r: torch.zeros(LARGE),
    "two levels": lambda r: torch.randint(2, (LARGE,), generator=r).float(),
    "many equals": lambda r: (torch.randn(LARGE, generator=r) * 4).round() / 2,
    "bfloat16": lambda r: (torch.randn(LARGE, generator=r) * 3).bfloat16().float(),
    "one peak": lambda r: torch.randn(LARGE, generator=r) + 30.0 * (torch.arange(LARGE) == LARGE - 1),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (1, 1.0), (5, 0.7), (K - 1, 0.5), (K, 1.0), (K, 0.9), (K, 1e-6), (LARGE, 1.0)])
def test_lowered_draws_are_those_of_a_large_vocabulary(shape: str, top_k: int, top_p: float) -> None:
    """Of more tokens than are ranked; equals of the border lie beyond the ranked ones too."""
    logits = SHAPES[shape](torch.Generator().manual_seed(11))
    for temperature, min_p in ((0.0, 0.0), (1e-38, 0.0), (0.3, 0.0), (1.0, 0.11), (50.0, 0.0)):
        check_lowered(logits, (temperature, top_k, top_p, min_p), UNIFORM)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("min_p", [0.0, 0.11])
def test_lowered_draws_of_top_p_alone_are_right_or_none(shape: str, top_p: float, min_p: float) -> None:
    """No token exactly where it takes more than are ranked to reach top_p, and min_p drops none of those."""
    logits = SHAPES[shape](torch.Generator().manual_seed(11))
    for temperature in (0.0, 0.3, 1.0, 50.0):
        heat = ((logits.double() - logits.max()) / max(temperature, 1e-30)).exp().sort(descending=True)[0]
        needs_more = bool(heat[:K].sum() < top_p * heat.sum()) and float(heat[K - 1]) >= min_p
        columns = (torch.tensor([temperature]), torch.zeros(1, dtype=torch.int32), torch.tensor([top_p]), torch.tensor([min_p]))
        tokens = LOWERED(logits.expand(1, len(UNIFORM), -1), *columns, UNIFORM[None])
        if needs_more and temperature > 0:
            assert (tokens == UNDECIDED).all()
        else:
            check_lowered(logits, (temperature, 0, top_p, min_p), UNIFORM)


def test_lowered_greedy_rows_tell_the_closest_logits_apart() -> None:
    """The weights of both at temperature 1 would be equal in f32."""
    logits = torch.tensor([0.0, 1e-9, 1e-9, -1e-9])
    check_lowered(logits, (0.0, 0, 1.0, 0.0), UNIFORM)


@pytest.mark.parametrize("vocab_size, length", [(248320, 512), (151936, 128), (97, 1), (1, 1), (3136, 56)])
def test_parts_of_a_vocabulary(vocab_size: int, length: int) -> None:
    assert vocab_size % part_length(vocab_size) == 0
    assert part_length(vocab_size) == length


@pytest.mark.parametrize("vocab", [40, 2 * MAX_RANKED])
@pytest.mark.parametrize("backend", ["eager", "inductor", "ge"])
@pytest.mark.usefixtures("kernels")
def test_a_row_of_no_numbers_has_no_token(backend, vocab):
    """NaN anywhere, or infinity as the largest; minus infinity is a token that is never sampled. Other rows keep their tokens."""
    logits = torch.randn(2, 6, vocab, generator=torch.Generator().manual_seed(1)).repeat(3, 1, 1)
    knobs = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.7, 0.7]), torch.tensor([0, 0, 0, 0, 5, 5], dtype=torch.int32), torch.ones(6), torch.zeros(6)
    uniform = torch.rand(6, 6, generator=torch.Generator().manual_seed(2))
    want = ops.sample(logits, *knobs, uniform)
    spoilt = logits.clone()
    spoilt[:, 0, 3], spoilt[:, 1, -1], spoilt[:, 2], spoilt[:, 3, 0] = math.nan, math.inf, -math.inf, math.nan
    spoilt[:, 4] = torch.where(spoilt[:, 4] < 0, -math.inf, spoilt[:, 4])
    got = ops.sample.lower_for(backend)(spoilt, *knobs, uniform)
    assert (got[:, :4] == NON_FINITE).all()
    assert torch.equal(got[:2, 4:], want[:2, 4:])
    assert (got[:, 4:] >= 0).all()
    assert torch.equal(got[:, 5], want[:, 5])
