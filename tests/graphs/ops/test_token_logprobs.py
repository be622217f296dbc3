"""graphs/ops/token_logprobs.py: log probabilities equal those computed in f64, for any logits, and only for rows that ask for them."""

from __future__ import annotations

import math

import pytest
import torch

from npucompile.graphs import ops

BACKENDS = ["eager", "ge"]


def logprobs(backend, logits, tokens, asked, most):
    rows = [torch.tensor(x, dtype=torch.int32) for x in (tokens, asked)]
    return ops.token_logprobs.lower_for(backend)(logits, *rows, most)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale, shift", [(1.0, 0.0), (30.0, 0.0), (0.0, 0.0), (5.0, 1e4), (5.0, -1e4)])
def test_they_equal_the_logarithm_of_softmax(backend, scale, shift):
    logits = torch.randn(3, 2, 50, generator=torch.Generator().manual_seed(1)) * scale + shift
    tokens = [[0, 49], [7, 7], [20, 3]]
    chosen, ids, values = logprobs(backend, logits, tokens, [1, 1, 1], 4)
    wanted = logits.double().log_softmax(-1)
    torch.testing.assert_close(chosen.double(), wanted.gather(-1, torch.tensor(tokens)[..., None])[..., 0], atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(values.double(), wanted.sort(-1, descending=True)[0][..., :4], atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(wanted.gather(-1, ids.long()), values.double(), atol=1e-5, rtol=1e-6)
    assert (chosen.dtype, ids.dtype, values.dtype) == (torch.float32, torch.int32, torch.float32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_that_did_not_ask_hold_zeros_even_where_logits_are_nan(backend):
    logits = torch.full((3, 1, 8), math.nan)
    logits[1] = torch.arange(8.0)
    results = logprobs(backend, logits, [[3], [7], [3]], [0, 1, 0], 2)
    for tensor in results:
        assert not tensor[0].any()
        assert not tensor[2].any()
    assert results[1][1].tolist() == [[7, 6]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_that_cannot_be_has_no_probability_and_hides_no_other(backend):
    logits = torch.tensor([[[0.0, -math.inf, 0.0]]])
    chosen, ids, values = logprobs(backend, logits, [[1]], [1], 2)
    assert chosen.item() == -math.inf
    assert sorted(ids[0, 0].tolist()) == [0, 2]
    assert values[0, 0].tolist() == pytest.approx([-math.log(2)] * 2)
