"""graphs/ops/adjust_logits.py: biases and penalties are those of transformers, in vLLM's order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from npucompile.graphs import ops


@pytest.mark.parametrize("backend", ["eager", "inductor", "ge"])
@given(st.data())
def test_logits_are_those_of_transformers_processors(backend, data):
    """A bias, then the factor of what was seen, then a penalty; each row has any of the three, at each of its positions others."""
    B, Q, A, V = (data.draw(st.integers(1, most)) for most in (4, 3, 3, 70))
    seed, factor = data.draw(st.integers(0, 2**31)), data.draw(st.sampled_from([0.5, 1.3, 2.0]))
    draw = np.random.default_rng(seed)
    seen = draw.random((A, Q, -(-V // 32) * 32)) < 0.3
    packed = torch.from_numpy(np.packbits(seen, axis=-1, bitorder="little").view(np.int32))
    adjustments = torch.from_numpy(draw.standard_normal((A, Q, V), np.float32))
    logits = torch.from_numpy(draw.standard_normal((B, Q, V), np.float32))
    bias, penalty, sets = (data.draw(st.lists(st.integers(0, A), min_size=B, max_size=B)) for _ in range(3))
    rows = [torch.tensor(numbers, dtype=torch.int32) for numbers in (bias, penalty, sets)]
    factors = torch.tensor([factor if number else 1.0 for number in sets])
    got = ops.adjust_logits.lower_for(backend)(logits, adjustments, rows[0], rows[1], packed, rows[2], factors)
    for row in range(B):
        for place in range(Q):
            want, had = logits[row, place][None], torch.from_numpy(np.flatnonzero(seen[sets[row] - 1, place, :V]))[None]
            if bias[row]:
                added = {(token,): float(value) for token, value in enumerate(adjustments[bias[row] - 1, place])}
                want = SequenceBiasLogitsProcessor(added)(torch.zeros(1, 1, dtype=torch.int64), want)
            if sets[row] and had.numel():
                want = RepetitionPenaltyLogitsProcessor(factor)(had, want)
            if penalty[row]:
                want = want + adjustments[penalty[row] - 1, place]
            torch.testing.assert_close(got[row, place], want[0], atol=1e-6, rtol=1e-6)
