"""graphs/ops/mask_logits.py: a token is left exactly where the row's mask, read as XGrammar and llguidance write it, has a one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs import ops


@pytest.mark.parametrize("backend", ["eager", "inductor", "ge"])
@given(st.data())
def test_tokens_are_left_where_bits_are_set(backend, data):
    """Against numpy's reading of the same words, all 32 bits of which occur; rows of mask 0 keep everything."""
    B, Q, C, V = (data.draw(st.integers(1, most)) for most in (4, 3, 3, 70))
    words = -(-V // 32)
    seed = data.draw(st.integers(0, 2**31))
    bits = np.random.default_rng(seed).random((C, Q, words * 32)) < 0.5
    packed = np.packbits(bits, axis=-1, bitorder="little").view(np.int32)
    rows = data.draw(st.lists(st.integers(0, C), min_size=B, max_size=B))
    logits = torch.randn(B, Q, V, generator=torch.Generator().manual_seed(seed))
    got = ops.mask_logits.lower_for(backend)(logits, torch.from_numpy(packed), torch.tensor(rows, dtype=torch.int32))
    for row, mask in enumerate(rows):
        allowed = bits[mask - 1][:, :V] if mask else np.ones((Q, V), bool)
        want = np.where(allowed, logits[row].numpy(), np.finfo(np.float32).min)
        assert np.array_equal(got[row].numpy(), want)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.5])
@pytest.mark.parametrize("backend", ["eager", "ge"])
def test_only_allowed_tokens_are_sampled(backend, temperature):
    """A mask with one bit is that token, whatever is drawn; with several, their probabilities are renormalised."""
    V, draws = 40, 64
    logits = torch.randn(1, draws, V, generator=torch.Generator().manual_seed(1))
    one, some = (torch.zeros(draws, 64, dtype=torch.bool) for _ in range(2))
    one[:, 37] = True
    some[:, [3, 31, 32]] = True
    masks = torch.from_numpy(np.packbits(torch.stack([one, some]).numpy(), axis=-1, bitorder="little").view(np.int32))
    knob = torch.tensor([temperature]), torch.tensor([0], dtype=torch.int32), torch.ones(1), torch.zeros(1)
    uniform = torch.rand(1, draws, generator=torch.Generator().manual_seed(2))
    for row, legal in ((1, {37}), (2, {3, 31, 32})):
        masked = ops.mask_logits.lower_for(backend)(logits, masks, torch.tensor([row], dtype=torch.int32))
        tokens = ops.sample.lower_for(backend)(masked, *knob, uniform)
        assert set(tokens.flatten().tolist()) == legal
