"""runtime/scheduler/decode_batch.py: what steps do to a batch is what they do to each of its requests, and older states stay."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.scheduling import all_decode, policy, request

from npucompile.runtime.request import Sampling
from npucompile.runtime.scheduler.decode_batch import batch_of
from npucompile.runtime.scheduler.request_state import RequestState

DRAFTS = 2
RULES = policy(decode=(4,), prefill=((4, 8),), pages=200, requests=5, page_size=2, length=60, drafts=DRAFTS)
REQUESTS = [
    request(name, prompt=3 + i, max_tokens=40, speculative_tokens=most)
    for i, (name, most) in enumerate(zip("abcd", (None, 0, 1, 2), strict=True))
]


@given(st.permutations(range(4)), st.lists(st.lists(st.integers(1, 3), min_size=4, max_size=4), max_size=5), st.booleans())
def test_steps_of_a_batch_are_steps_of_its_requests(order: list[int], steps: list[list[int]], ahead: bool) -> None:
    running = all_decode(RULES, *REQUESTS).groups[0].running
    # Rows are in the order in which the requests were last scheduled.
    states = [live._replace(last_scheduled=place) for live, place in zip(running, order, strict=True)]
    batch = batch_of(RULES, states, 0)
    assert batch is not None
    made, rank = [(batch, tuple(states))], 100
    rows = sorted(range(4), key=lambda i: order[i])
    for number, counts in enumerate(steps):
        for _ in range(1 + (ahead and number == 0)):
            pages = batch.progress.num_pages + number
            batch = batch.launched(pages, int(pages.sum()), rank)
            states = [live.decode_launched(live.num_pages + number, rank + rows.index(i)) for i, live in enumerate(states)]
            made.append((batch, tuple(states)))
            rank += 4
        verified = batch.members.drafts
        counts = [min(count, drafts + 1) for count, drafts in zip(counts, verified.tolist(), strict=True)]
        tokens = [(7,) * count for count in counts]
        assert batch.grows
        batch = batch.committed(f"d{number % 2}", 3, tokens, batch.members.prompts * 0 + counts, verified)
        states = [
            live.decode_committed(f"d{number % 2}", tokens[row], counts[row], int(verified[row]), 3)
            for live, row in zip(states, (rows.index(i) for i in range(4)), strict=True)
        ]
        made.append((batch, tuple(states)))
    for found, expected in made:
        assert found == expected
        assert found.members.urgent_first([found.row(i) for i in range(4)]) == list(expected)
        assert not any(hasattr(value, "dtype") for state in found for value in (*state, *state.record))
    assert [found.grows for found, _ in made] == [
        found.progress.num_computed is made[-1][0].progress.num_computed or not steps for found, _ in made
    ]


def test_who_is_no_batch() -> None:
    rules = policy(decode=(4,), prefill=((4, 8),), pages=200, requests=8, length=60)
    running = tuple(all_decode(rules, *(request(name, max_tokens=40) for name in "abcd")).groups[0].running)
    first, others = running[0], running[1:]
    assert batch_of(rules, running, 0) is not None
    assert batch_of(rules, (), 0) is None
    # A decode step has four rows.
    assert batch_of(rules, (*running, first._replace(arrival=99)), 0) is None
    # Of one the results of another step are not known.
    assert batch_of(rules, running, 1) is None
    assert batch_of(rules, (first.decode_launched(9, 9), *others), 0) is None
    # It is a prompt in progress, or its first token is not known.
    prompt = RequestState(first.request, first.arrival, 0.0, num_pages=2)
    assert batch_of(rules, (prompt, *others), 0) is None
    assert batch_of(rules, (prompt.prefill_launched(3, 2, 0, 0.0), *others), 0) is None
    biased = replace(first.request, sampling=Sampling(logit_bias=((1, 2.0),)))
    assert batch_of(rules, (first._replace(request=biased), *others), 0) is None


@pytest.mark.parametrize("prompts", [1, 2])
def test_a_state_that_others_went_on_from_does_not_grow(prompts: int) -> None:
    running = all_decode(RULES, *REQUESTS[:prompts]).groups[0].running
    batch = batch_of(RULES, running, 0)
    assert batch is not None
    # Each goes on by itself from a record of the batch.
    alone = [live.decode_launched(9, 9).decode_committed("d", (5,), 1, 0, 0) for live in batch]
    assert not batch.grows
    assert tuple(batch) == tuple(running)
    assert [live.output_token_ids[-1] for live in alone] == [5] * prompts
