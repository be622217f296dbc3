"""What the host writes into a request slot is what a decode step reads there."""

from __future__ import annotations

import pytest
import torch

from npucompile.graphs import request_slot
from npucompile.graphs.types import Limits
from npucompile.models import request_slots


@pytest.mark.parametrize("picture_rows", [0, 8])
def test_a_step_starts_where_the_host_says(picture_rows):
    limits = Limits(4, 31, 10, 40, slots_per_request=3, drafts=2, picture_rows=picture_rows)
    pool = torch.zeros(request_slots.state(limits).shape, dtype=torch.int32)
    pool[1] = request_slot.start(17, 5, limits, -3)
    slots = torch.tensor([[7, 8, 9]], dtype=torch.int32)
    inputs = {"request_slots": torch.tensor([1], dtype=torch.int32), "drafts": torch.zeros(1, dtype=torch.int32), "state_slots_out": slots}
    start = request_slots.read(pool, inputs, limits, 3)
    assert (start.tokens[0, 0], start.num_computed_tokens.tolist(), start.state_slots_in.tolist()) == (5, [17], [7])
    assert start.query_lens.tolist() == [1]
    assert (start.position_offsets.tolist() if picture_rows else start.position_offsets) == ([-3] if picture_rows else None)
