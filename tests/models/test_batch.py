"""The inputs of a bucket, and what layers derive from them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from npucompile.graphs.types import Bucket, Limits
from npucompile.models.batch import Batch, abstract_inputs

LIMITS = Limits(page_size=4, num_pages=9, num_slots=5, max_model_len=24)
SAMPLING = {"temperature": (), "top_k": (), "top_p": (), "min_p": ()}
ANY = {"seats": (), "page_table": (6,), **SAMPLING}


def shapes(bucket: Bucket, limits: Limits, **options: bool) -> dict[str, tuple[int, ...]]:
    """Of every input, without the batch, which is its first size."""
    avals = abstract_inputs(bucket, limits, **options)
    assert all(aval.shape[0] == bucket.batch for aval in avals.values())
    floats = {name for name, aval in avals.items() if aval.dtype == torch.float32}
    assert floats == {"temperature", "top_p", "min_p", "uniform"}
    assert {aval.dtype for name, aval in avals.items() if name not in floats} == {torch.int32}
    return {name: aval.shape[1:] for name, aval in avals.items()}


@pytest.mark.parametrize("drafts", [0, 1, 3, 7])
def test_decode_reads_tokens_and_places_from_seats(drafts):
    """What it is given has no token and no position but the smallest possible one."""
    Q, limits = drafts + 1, replace(LIMITS, slots_per_request=drafts + 1, drafts=drafts)
    wanted = ANY | {"drafts": (), "base": (), "write_slots": (Q,), "uniform": (2 * Q - 1,)}
    assert shapes(Bucket("decode", 3, Q), limits) == wanted
    assert shapes(Bucket("decode", 3, Q), limits, logprobs=True) == wanted | {"logprobs": ()}


@pytest.mark.parametrize("drafts", [0, 3])
def test_prefill_is_given_the_token_after_a_chunk_where_it_drafts(drafts):
    limits = replace(LIMITS, slots_per_request=drafts + 1, drafts=drafts)
    wanted = ANY | {"tokens": (16,), "starts": (), "lengths": (), "read_slots": (), "write_slots": (1,), "uniform": (1,)}
    wanted |= {"next_tokens": ()} if drafts else {}
    assert shapes(Bucket("prefill", 2, 16), limits) == wanted
    assert shapes(Bucket("prefill", 2, 16), limits, logprobs=True) == wanted | {"logprobs": ()}


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
