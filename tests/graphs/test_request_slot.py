"""What the host writes into a request slot is what a decode step reads there."""

from __future__ import annotations

import torch

from npucompile.graphs import request_slot
from npucompile.graphs.types import Limits
from npucompile.models import request_slots


def test_a_step_starts_where_the_host_says():
    limits = Limits(page_size=4, num_pages=31, num_slots=10, max_model_len=40, slots_per_request=3, drafts=2)
    pool = torch.zeros(request_slots.state(limits).shape, dtype=torch.int32)
    pool[1] = request_slot.start(position=17, token=5, drafts=2)
    slots = torch.tensor([[7, 8, 9]], dtype=torch.int32)
    inputs = {"request_slots": torch.tensor([1], dtype=torch.int32), "drafts": torch.zeros(1, dtype=torch.int32), "state_slots_out": slots}
    start = request_slots.read(pool, inputs, limits)
    assert (start.tokens[0, 0], start.num_computed_tokens.tolist(), start.state_slots_in.tolist()) == (5, [17], [7])
    assert start.query_lens.tolist() == [1]
