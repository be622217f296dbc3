"""What the host writes into a request slot is what a decode step reads there."""

from __future__ import annotations

import pytest
import torch

from npucompile.graphs.steps import request_slot
from npucompile.graphs.types import Limits
from npucompile.models import request_slots


@pytest.mark.parametrize(("picture_rows", "drafts", "q_len"), [(0, 2, 3), (0, 2, 1), (8, 2, 3), (8, 2, 2), (8, 2, 1), (8, 0, 1)])
def test_a_step_starts_where_the_host_says(picture_rows, drafts, q_len):
    limits = Limits(4, 31, 10, 40, slots_per_request=drafts + 1, drafts=drafts, picture_rows=picture_rows)
    pool = torch.zeros(request_slots.state(limits).shape, dtype=torch.int32)
    pool[1] = request_slot.start(17, [5], limits, -3)
    slots = torch.tensor([[7, 8, 9][: drafts + 1]], dtype=torch.int32)
    inputs = {"request_slots": torch.tensor([1], dtype=torch.int32), "drafts": torch.zeros(1, dtype=torch.int32), "state_slots_out": slots}
    start = request_slots.read(pool, inputs, limits, q_len)
    assert (start.tokens[0, 0], start.num_computed_tokens.tolist(), start.state_slots_in.tolist()) == (5, [17], [7])
    assert start.query_lens.tolist() == [1]
    offsets = [-3, *([-3, -2, -1] if drafts else [])] if picture_rows else []
    assert [each for part in start.offsets for each in part[0].tolist()] == offsets
    added = {name: value[0].tolist() for name, value in start.inputs().items() if name.endswith("offsets")}
    candidates = {"candidate_offsets": offsets[1 : 1 + q_len]} if drafts else {}
    assert added == ({"position_offsets": [-3], **candidates} if picture_rows else {})
