"""The inputs of a bucket, and what layers derive from them."""

from __future__ import annotations

import pytest
import torch

from npucompile.graphs.types import Bucket, Limits
from npucompile.models.batch import Batch, abstract_inputs

LIMITS = Limits(page_size=4, num_pages=9, num_slots=5, max_model_len=24)


@pytest.mark.parametrize("bucket, W", [(Bucket("decode", 3, 1), 1), (Bucket("decode", 3, 4), 4), (Bucket("prefill", 2, 16), 1)], ids=str)
def test_shapes_follow_the_bucket(bucket, W):
    B, Q = bucket.batch, bucket.q_len
    shapes = {name: aval.shape for name, aval in abstract_inputs(bucket, LIMITS).items()}
    wide = {"tokens": (B, Q), "page_table": (B, 6), "write_slots": (B, W), "uniform": (B, W)}
    assert shapes == wide | {name: (B,) for name in shapes if name not in wide}
    floats = {name for name, aval in abstract_inputs(bucket, LIMITS).items() if aval.dtype == torch.float32}
    assert floats == {"temperature", "top_p", "min_p", "uniform"}


def test_angles_are_those_of_each_tokens_position():
    inputs = {name: torch.zeros(aval.shape, dtype=aval.dtype) for name, aval in abstract_inputs(Bucket("prefill", 2, 3), LIMITS).items()}
    inputs["starts"][:] = torch.tensor([0, 7])
    inputs["tokens"][:] = torch.tensor([[1, 2, 3], [4, 5, 6]])
    batch = Batch.of(inputs, 4, 100.0)
    assert (batch.size, batch.q_len, batch.tokens.tolist()) == (2, 3, [1, 2, 3, 4, 5, 6])
    angles = torch.tensor([0.0, 1, 2, 7, 8, 9])[:, None] * torch.tensor([1.0, 0.1])
    torch.testing.assert_close(batch.cos, angles.cos())
    torch.testing.assert_close(batch.sin, angles.sin())
    assert batch.lengths is inputs["lengths"]
