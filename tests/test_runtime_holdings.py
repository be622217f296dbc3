"""runtime/holdings.py: what a step says about ownership is done, and its rows have what their requests own."""

from __future__ import annotations

import pytest

from npucompile.graphs.types import Bucket, Limits
from npucompile.runtime.holdings import Holdings
from npucompile.runtime.pages import OwnershipError
from npucompile.runtime.request import Request, Sampling
from npucompile.runtime.scheduler import Policy, State, commit, plan, submit
from npucompile.runtime.uniform import uniform

LIMITS = Limits(page_size=4, num_pages=9, num_slots=7, max_model_len=16, slots_per_request=2)
BUCKETS = (Bucket("prefill", 1, 8), Bucket("decode", 2, 1))


def fresh(*requests):
    state = State(Policy(LIMITS, BUCKETS))
    for one in requests:
        state = submit(state, one, 0.0)
    return state


def advance(state, holdings):
    step = plan(state)
    inputs = holdings.inputs(step.bucket, step)
    state, _ = commit(state, step, [[1]] * len(step.turns), started_ms=0.0, now_ms=1.0)
    return state, inputs


def test_rows_get_what_their_requests_own():
    holdings, state = Holdings(LIMITS), fresh(Request("a", (1, 2, 3, 4, 5), 4, Sampling(1.0, seed=9)), Request("b", (6,), 4))
    for _ in range(3):
        state, inputs = advance(state, holdings)
        holdings.check(state)
    while len(state.running) < 2 or plan(state).bucket.kind != "decode":
        state, inputs = advance(state, holdings)
    state, inputs = advance(state, holdings)
    rows = {0: "a", 1: "b"} if inputs["starts"][0] > inputs["starts"][1] else {0: "b", 1: "a"}
    for row, name in rows.items():
        pages, slots = list(holdings.pages.owned(name)), list(holdings.slots.owned(name))
        assert inputs["page_table"][row, : len(pages)].tolist() == pages
        assert inputs["read_slots"][row] in slots
        assert set(inputs["write_slots"][row]) <= set(slots)
    index = {name: row for row, name in rows.items()}
    assert inputs["uniform"][index["b"], 0] == 0
    assert inputs["uniform"][index["a"], 0] in {uniform(9, i) for i in range(1, 4)}


def test_an_idle_group_runs_padding_and_owns_nothing():
    holdings = Holdings(LIMITS)
    inputs = holdings.inputs(BUCKETS[1], None)
    assert inputs["tokens"].shape == (2, 1)
    assert not any(inputs[name].any() for name in ("lengths", "page_table", "read_slots", "write_slots"))
    holdings.check(fresh())


def test_what_the_scheduler_does_not_know_is_a_leak():
    holdings, state = Holdings(LIMITS), fresh(Request("a", (1,), 4))
    state, _ = advance(state, holdings)
    holdings.check(state)
    holdings.pages.allocate(1, "thief")
    with pytest.raises(OwnershipError, match=r"owners \['a', 'thief'\]; the scheduler has .* running requests \['a'\]"):
        holdings.check(state)
    holdings.release("thief")
    holdings.release("a")
    with pytest.raises(OwnershipError, match="has 8 free and owners"):
        holdings.check(state)
