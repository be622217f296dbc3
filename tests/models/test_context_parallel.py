"""models/context_parallel.py: slices of a chunk are shared evenly, and every token has one place in the stream."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from npucompile.models import context_parallel
from npucompile.models.context_parallel import inverse, last_rows, order, ordered, slices

CPU = torch.device("cpu")


@st.composite
def steps(draw: st.DrawFn) -> tuple[int, int, int]:
    count = draw(st.integers(2, 6))
    return count, draw(st.integers(1, 4)), 2 * count * draw(st.integers(1, 5))


@given(steps())
def test_every_token_has_one_place_and_devices_share_causal_work_evenly(step: tuple[int, int, int]) -> None:
    count, size, q_len = step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_parallel, "num_shards", lambda axis: count)
        there, back = order(size, q_len, CPU), inverse(size, q_len, CPU)
        assert sorted(there.tolist()) == list(range(size * q_len))
        assert there[back.long()].tolist() == list(range(size * q_len))
        # A query of position i in its chunk sees i + 1 of the chunk's keys.
        work = (there % q_len + 1).view(count, -1).sum(1)
        assert work.unique().numel() == 1
        rows, first = slices(size, q_len, CPU)
        each = q_len // (2 * count)
        assert there.view(-1, each)[:, 0].tolist() == (rows * q_len + first).tolist()
        # One after the other in each slice.
        assert (there.view(-1, each) - there.view(-1, each)[:, :1] == torch.arange(each)).all()


@given(steps(), st.data())
def test_the_last_token_of_each_row_is_found(step: tuple[int, int, int], data: st.DataObject) -> None:
    count, size, q_len = step
    lengths = torch.tensor(data.draw(st.lists(st.integers(1, q_len), min_size=size, max_size=size)), dtype=torch.int32)
    tokens = torch.arange(size * q_len).view(size, q_len)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_parallel, "num_shards", lambda axis: count)
        found = last_rows(ordered(tokens)[:, None], lengths)[:, 0]
        assert torch.equal(context_parallel.in_rows(ordered(tokens)[:, None], size)[:, 0], tokens.flatten())
    assert found.tolist() == [int(tokens[row, length - 1]) for row, length in enumerate(lengths)]


@pytest.mark.parametrize("q_len", [1, 5])
def test_rows_that_do_not_divide_are_in_their_own_order(q_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those that a draft head drafts from, one a request."""
    monkeypatch.setattr(context_parallel, "num_shards", lambda axis: 2)
    tokens = torch.arange(3 * q_len).view(3, q_len)
    assert context_parallel.shares(q_len) == 1
    assert torch.equal(ordered(tokens), tokens.flatten())
