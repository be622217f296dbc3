"""models/batch.py: what the layers of a step derive from its inputs."""

from __future__ import annotations

import torch

from npucompile.graphs.steps.table import StepInputs
from npucompile.graphs.types import Bucket, Limits
from npucompile.models.batch import Batch
from npucompile.models.rotary import Rotary

LIMITS = Limits(page_size=4, num_pages=9, num_slots=5, max_model_len=24)


def test_angles_are_those_of_each_tokens_position():
    inputs = StepInputs(Bucket("prefill", 2, 3), LIMITS).padding()
    inputs["num_computed_tokens"][:] = torch.tensor([0, 7])
    inputs["tokens"][:] = torch.tensor([[1, 2, 3], [4, 5, 6]])
    batch = Batch.of(inputs, Rotary(4, 100.0))
    assert (batch.size, batch.q_len, batch.tokens.tolist()) == (2, 3, [1, 2, 3, 4, 5, 6])
    angles = torch.tensor([0.0, 1, 2, 7, 8, 9])[:, None] * torch.tensor([1.0, 0.1])
    torch.testing.assert_close(batch.cos, angles.cos())
    torch.testing.assert_close(batch.sin, angles.sin())
    assert batch.query_lens is inputs["query_lens"]
