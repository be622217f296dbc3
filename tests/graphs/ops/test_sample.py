"""graphs/ops/sample.py: probabilities of sampled tokens are exactly those that temperature, top-k, top-p and min-p define."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from npucompile.graphs import ops

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


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-44])
def test_a_tiny_temperature_is_nearly_greedy(temperature: float) -> None:
    assert draws([-7.0, 5.0, 40.0, 39.0], temperature, 0, 1.0, 0.0, torch.tensor([0.0, 0.5, 0.999])).tolist() == [2, 2, 2]


def test_rows_mix() -> None:
    """Greedy and sampled requests share a step; each row has its own parameters and each token its own random number."""
    logits = torch.randn(3, 2, 6, generator=torch.Generator().manual_seed(0))
    knobs = [(0.0, 0, 1.0, 0.0), (1.0, 2, 1.0, 0.0), (0.7, 0, 0.6, 0.05)]
    uniform = torch.tensor([[0.3, 0.9], [0.2, 0.8], [0.1, 0.99]])
    columns = [torch.tensor(column) for column in zip(*knobs, strict=True)]
    together = ops.sample(logits, columns[0], columns[1].int(), columns[2], columns[3], uniform)
    for b, knob in enumerate(knobs):
        for t in range(2):
            assert together[b, t] == draws(logits[b, t].tolist(), *knob, uniform[b, t : t + 1])[0]
