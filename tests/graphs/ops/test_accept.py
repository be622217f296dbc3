"""graphs/ops/accept.py: acceptance equals rejection sampling, shown exhaustively, by exact probabilities and by a statistical test."""

from __future__ import annotations

import itertools

import pytest
import torch
from support import speculators

from npucompile.graphs import ops

KNOBS = {
    "temperature": {"temperature": 0.7},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.3},
    "all": {"temperature": 1.4, "top_k": 4, "top_p": 0.9, "min_p": 0.15},
}
V, GRID = 5, 4096


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


def drawn(logits, uniform, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """`ops.sample` with the same knobs for all rows: logits [B, Q, V] and numbers [B, Q] -> [B, Q]."""
    rows = torch.ones(len(logits))
    return ops.sample(logits, rows * temperature, (rows * top_k).int(), rows * top_p, rows * min_p, uniform)


@pytest.mark.parametrize("backend", ["eager", "ge"])
def test_every_block_keeps_its_leading_equal_drafts_and_one_token(backend):
    """Every combination of drafts and samples of two tokens, for three drafts per row and every number of valid drafts."""
    blocks = [
        (sampled, (9, *drafts), length)
        for sampled in itertools.product(range(2), repeat=4)
        for drafts in itertools.product(range(2), repeat=3)
        for length in range(5)
    ]
    wanted = []
    for sampled, candidates, length in blocks:
        count = min(length, 1)
        while 0 < count < length and candidates[count] == sampled[count - 1]:
            count += 1
        wanted.append(count)
    counts = ops.accept.lower_for(backend)(*(ints([block[i] for block in blocks]) for i in range(3)))
    assert counts.dtype == torch.int32
    assert counts.tolist() == wanted


@pytest.mark.parametrize("backend", ["eager", "ge"])
def test_a_step_without_drafts_gives_one_token(backend):
    assert ops.accept.lower_for(backend)(ints([[3], [4]]), ints([[3], [3]]), ints([1, 0])).tolist() == [1, 0]


def distribution(seed):
    return torch.randn(V, generator=torch.Generator().manual_seed(seed)) * 1.5


@pytest.mark.parametrize("knobs", KNOBS.values(), ids=KNOBS)
@pytest.mark.parametrize("seed", range(4))
def test_a_draft_is_kept_by_its_probability_and_replaced_from_what_is_left(knobs, seed):
    """Over an even grid of random numbers, frequencies equal probabilities to within one grid step."""
    logits = distribution(seed)
    p = speculators.textbook(logits, **knobs)
    rows = logits.expand(GRID, 2, V)
    uniform = ((torch.arange(GRID) + 0.5) / GRID)[:, None].expand(GRID, 2)
    sampled = drawn(rows, uniform, **knobs)
    for draft in range(V):
        candidates = torch.tensor([0, draft], dtype=torch.int32).expand(GRID, 2)
        kept = ops.accept(sampled, candidates, torch.full((GRID,), 2, dtype=torch.int32)) == 2
        assert abs(float(kept.double().mean()) - p[draft]) <= 1 / GRID
        left = [0.0 if token == draft else q / max(1 - p[draft], 1e-9) for token, q in enumerate(p)]
        for token in range(V):
            share = float((sampled[~kept, 0] == token).double().sum()) / max(int((~kept).sum()), 1)
            assert abs(share - left[token]) <= 2 / (GRID * max(1 - p[draft], 1 / GRID)), (draft, token)


TRIALS, SIGNIFICANCE = 40_000, 1e-3
"""Drafts of a block, from a vocabulary of three tokens, so that every outcome is frequent."""


def rejection(drafts, probabilities, draw):
    """The textbook's block: each draft is kept with its probability; the first rejected one is resampled from p without it."""
    block = ()
    for draft in drafts:
        p = list(probabilities[block])
        if draw.random() < p[draft]:
            block += (draft,)
            continue
        p[draft] = 0.0
        return (*block, *draw.choices(range(3), p))
    return (*block, *draw.choices(range(3), probabilities[block]))


def exact(drafts, probabilities):
    """Probability of every possible block."""
    masses, along = {}, 1.0
    for t, draft in enumerate((*drafts, None)):
        p = probabilities[drafts[:t]]
        masses |= {(*drafts[:t], token): along * p[token] for token in range(3) if token != draft}
        along *= p[draft] if draft is not None else 0.0
    return {block: p for block, p in masses.items() if p > 0}
