"""models/request_slots.py: a request slot tells where the next step of a request starts, and a step updates it."""

from __future__ import annotations

import pytest
import torch

from npucompile.graphs.types import Limits
from npucompile.models import request_slots

LIMITS = Limits(page_size=4, num_pages=31, num_slots=10, max_model_len=40, slots_per_request=3, drafts=2)


def pool(*rows):
    """The null request slot and these."""
    return torch.tensor([[0] * 5, *rows], dtype=torch.int32)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_there_is_a_request_slot_for_each_request_and_the_null_one():
    aval = request_slots.state(LIMITS)
    assert (aval.shape, aval.dtype) == ((4, 5), torch.int32)


@pytest.mark.parametrize("start, valid", [(36, 3), (37, 3), (38, 2), (39, 1), (40, 0)])
def test_no_row_goes_beyond_the_longest_context(start, valid):
    inputs = {"request_slots": ints(1, 1), "drafts": ints(2, 0), "state_slots_out": ints([1, 2, 3], [1, 2, 3])}
    assert request_slots.read(pool([start, 0, 5, 6, 7]), inputs, LIMITS, 3).query_lens.tolist() == [valid, min(valid, 1)]
