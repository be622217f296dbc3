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


def test_rows_start_where_their_request_slots_say():
    """Request slots in any order; the state slot is that of the last accepted token; padding has no valid candidate."""
    slots = pool([7, 0, 11, 12, 13], [20, 2, 21, 22, 23], [30, 1, 31, 32, 33])
    inputs = {"request_slots": ints(2, 0, 1, 3), "drafts": ints(2, 2, 0, 1)}
    inputs["state_slots_out"] = ints([4, 5, 6], [0, 0, 0], [3, 2, 1], [9, 7, 8])
    rows = request_slots.read(slots, inputs, LIMITS)
    assert rows.tokens.tolist() == [[21, 22, 23], [0, 0, 0], [11, 12, 13], [31, 32, 33]]
    assert rows.num_computed_tokens.tolist() == [20, 0, 7, 30]
    assert rows.query_lens.tolist() == [3, 0, 1, 2]
    assert rows.state_slots_in.tolist() == [6, 0, 3, 7]
    assert all(tensor.dtype == torch.int32 for tensor in rows)


@pytest.mark.parametrize("start, valid", [(36, 3), (37, 3), (38, 2), (39, 1), (40, 0)])
def test_no_row_goes_beyond_the_longest_context(start, valid):
    inputs = {"request_slots": ints(1, 1), "drafts": ints(2, 0), "state_slots_out": ints([1, 2, 3], [1, 2, 3])}
    assert request_slots.read(pool([start, 0, 5, 6, 7]), inputs, LIMITS).query_lens.tolist() == [valid, min(valid, 1)]


def test_the_next_step_reads_what_a_step_wrote():
    """Request slots without a row keep their values, and the null request slot stays zero whatever padding computed."""
    slots = pool([7, 0, 11, 12, 13], [20, 2, 21, 22, 23], [30, 1, 31, 32, 33])
    owners = ints(3, 0, 1, 0)
    tokens = ints([41, 42, 43], [1, 2, 3], [51, 52, 53], [4, 5, 6])
    written = request_slots.write(slots, owners, ints(32, 9, 8, 99), ints(1, 2, 0, 5), tokens)
    assert written.tolist() == [[0] * 5, [8, 0, 51, 52, 53], [20, 2, 21, 22, 23], [32, 1, 41, 42, 43]]
    assert written.dtype == torch.int32
    inputs = {"request_slots": owners, "drafts": ints(2, 2, 2, 2), "state_slots_out": ints([4, 5, 6], [0, 0, 0], [7, 8, 9], [0, 0, 0])}
    rows = request_slots.read(written, inputs, LIMITS)
    assert rows.tokens[::2].tolist() == [[41, 42, 43], [51, 52, 53]]
    assert rows.state_slots_in.tolist() == [5, 0, 7, 0]
    assert rows.query_lens.tolist() == [3, 0, 3, 0]


@pytest.mark.parametrize("q_len", [1, 2, 4, 8])
def test_a_token_gets_the_random_number_of_its_position(q_len):
    """Whether the unread step gave the fewest tokens, the most, or any number between."""
    numbers = torch.arange(2 * q_len - 1, dtype=torch.float32)
    base = torch.full((q_len,), 100, dtype=torch.int32)
    num_computed_tokens = base + torch.arange(q_len, dtype=torch.int32)
    window = request_slots.uniforms({"uniform": numbers.expand(q_len, -1), "base": base}, num_computed_tokens, q_len)
    assert window.tolist() == [[ahead + t for t in range(q_len)] for ahead in range(q_len)]


def test_rows_of_padding_get_some_random_numbers():
    """Base and position of padding are unrelated; the numbers are still those of the row."""
    numbers = torch.arange(10, dtype=torch.float32).view(2, 5)
    window = request_slots.uniforms({"uniform": numbers, "base": ints(0, 90)}, ints(50, 3), 3)
    assert window.tolist() == [[2, 3, 4], [5, 6, 7]]
