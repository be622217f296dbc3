"""runtime/scheduler/computed.py: what a step of a batch has computed is what it has of each request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.scheduling import all_decode, batch_tokens, policy, request

from npucompile.runtime.scheduler.advance import computed, launch
from npucompile.runtime.scheduler.computed import ComputedBatch
from npucompile.runtime.scheduler.decode_batch import DecodeBatch
from npucompile.runtime.scheduler.schedule import schedule
from npucompile.runtime.scheduler.steady import gathered

RULES = policy(decode=(4,), prefill=((4, 8),), pages=200, requests=5, page_size=2, length=60, drafts=2)


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple), min_size=3, max_size=3))
def test_a_batch_is_its_rows(token_ids: list[tuple[int, ...]]) -> None:
    state = gathered(all_decode(RULES, *(request(name, prompt=3 + i, max_tokens=40) for i, name in enumerate("abc"))))
    step = schedule(state)
    assert step is not None
    state = launch(state, step, 0.0)
    batch = state.groups[0].running
    assert isinstance(batch, DecodeBatch)
    tokens = batch_tokens(batch, token_ids)
    (found,), (expected,) = computed(state, step, [tokens]), computed(state, step, [list(tokens)])
    assert isinstance(found, ComputedBatch)
    assert (len(found), list(found), [found.row(i) for i in range(3)]) == (3, expected, expected)
    assert found.num_computed.tolist() == [row.num_computed_tokens for row in expected]
    for row in found:
        known = (*row.request.request.prompt, *row.request.output_token_ids, *row.output)
        assert [row.token_ids(start, 3) for start in range(row.num_tokens)] == [known[start : start + 3] for start in range(len(known))]
