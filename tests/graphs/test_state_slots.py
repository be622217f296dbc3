"""graphs/state_slots.py: which state a row starts from, and after how many tokens each state is stored."""

from __future__ import annotations

import torch

from npucompile.graphs.state_slots import read_states, states_to_write


def i32(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_a_fresh_row_starts_from_zeros_whatever_its_slot_holds() -> None:
    pool = torch.arange(12.0).view(4, 3)
    pool[2] = float("nan")
    got = read_states(pool, i32(3, 2, 3), i32(5, 0, 0))
    assert got.tolist() == [[9, 10, 11], [0, 0, 0], [0, 0, 0]]


def test_pools_of_any_rank_and_dtype() -> None:
    for shape in ((3,), (3, 2), (3, 2, 4, 5)):
        pool = torch.randn(shape).bfloat16()
        got = read_states(pool, i32(2, 1), i32(0, 7))
        assert got.dtype == pool.dtype
        assert torch.equal(got[0], torch.zeros_like(pool[0]))
        assert torch.equal(got[1], pool[1])


def test_one_slot_a_token_stores_the_state_after_each() -> None:
    got = states_to_write(torch.zeros(2, 3), i32(3, 1), 3)
    assert got.tolist() == [[1, 2, 3], [1, 2, 3]]
    assert got.dtype == torch.int32


def test_one_slot_a_row_stores_the_state_after_the_last_valid_token() -> None:
    got = states_to_write(torch.zeros(2, 1), i32(3, 0), 4)
    assert got.tolist() == [[3], [0]]
    assert got.dtype == torch.int32
