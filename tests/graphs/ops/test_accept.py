"""graphs/ops/accept.py: acceptance equals rejection sampling, shown exhaustively, by exact probabilities and by a statistical test."""

from __future__ import annotations

import itertools
import random

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


# --- a whole block, against the algorithm of arXiv:2211.17192 with all of the draft's distribution at one token ---

TRIALS, SIGNIFICANCE = 40_000, 1e-3
BLOCKS = [(1, 0, 2), (2, 1, 1), (0, 0, 0)]
"""Drafts of a block, from a vocabulary of three tokens, so that every outcome is frequent."""


def tables():
    """Logits after every prefix of up to three tokens, from a vocabulary of three."""
    generator = torch.Generator().manual_seed(5)
    prefixes = [prefix for n in range(4) for prefix in itertools.product(range(3), repeat=n)]
    return {prefix: torch.randn(3, generator=generator) for prefix in prefixes}


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


def ours(drafts, logits, knobs):
    """Blocks by `sample` and `accept`, TRIALS times."""
    along = [logits[drafts[:t]] for t in range(4)]
    rows = torch.stack(along).expand(TRIALS, 4, 3)
    sampled = drawn(rows, torch.rand(TRIALS, 4, generator=torch.Generator().manual_seed(6)), **knobs)
    candidates = torch.tensor([0, *drafts], dtype=torch.int32).expand(TRIALS, 4)
    counts = ops.accept(sampled, candidates, torch.full((TRIALS,), 4, dtype=torch.int32))
    return [tuple(tokens[:count]) for tokens, count in zip(sampled.tolist(), counts.tolist(), strict=True)]


def exact(drafts, probabilities):
    """Probability of every possible block."""
    masses, along = {}, 1.0
    for t, draft in enumerate((*drafts, None)):
        p = probabilities[drafts[:t]]
        masses |= {(*drafts[:t], token): along * p[token] for token in range(3) if token != draft}
        along *= p[draft] if draft is not None else 0.0
    return {block: p for block, p in masses.items() if p > 0}


def improbability(statistic, freedom):
    """Probability of a chi-square at least this large; without degrees of freedom 1 if it is zero, else 0."""
    if not freedom:
        return float(statistic < 1e-6)
    return float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), torch.tensor(statistic / 2).double()))


FEW = {"top_k": 2}


@pytest.mark.parametrize("drafts", BLOCKS, ids=str)
@pytest.mark.parametrize("knobs", [{}, *({**knobs, **FEW} if "top_k" in knobs else knobs for knobs in KNOBS.values())], ids=str)
def test_blocks_are_distributed_as_rejection_sampling_makes_them(knobs, drafts):
    """Chi-square of our blocks and of the textbook's, each against exact probabilities and against each other, at SIGNIFICANCE."""
    logits = tables()
    probabilities = {prefix: speculators.textbook(row, **knobs) for prefix, row in logits.items()}
    wanted = exact(drafts, probabilities)
    assert sum(wanted.values()) == pytest.approx(1)
    draw = random.Random(7)
    theirs, mine = [rejection(drafts, probabilities, draw) for _ in range(TRIALS)], ours(drafts, logits, knobs)
    assert set(theirs) | set(mine) <= set(wanted)
    counts = [{block: blocks.count(block) for block in wanted} for blocks in (mine, theirs)]
    for block_counts in counts:
        fit = sum((block_counts[block] - TRIALS * p) ** 2 / (TRIALS * p) for block, p in wanted.items())
        assert improbability(fit, len(wanted) - 1) > SIGNIFICANCE
    apart = sum((counts[0][block] - counts[1][block]) ** 2 / max(counts[0][block] + counts[1][block], 1) for block in wanted)
    assert improbability(apart, len(wanted) - 1) > SIGNIFICANCE


def test_the_test_sees_a_bias_of_two_percent():
    """Keeping a draft 2% too often fails the test."""
    p = [0.5, 0.3, 0.2]
    counts = [0.5 * 0.98, 0.3 * 0.98 + 0.02, 0.2 * 0.98]
    fit = sum((TRIALS * b - TRIALS * a) ** 2 / (TRIALS * a) for a, b in zip(p, counts, strict=True))
    assert improbability(fit, 2) < SIGNIFICANCE
    assert improbability(5.99, 2) == pytest.approx(0.05, rel=1e-2)
