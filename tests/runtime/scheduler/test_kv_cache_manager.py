"""runtime/scheduler/kv_cache_manager.py: what a step says about ownership is done, and its rows have what their requests own."""

from __future__ import annotations

import pytest

from npucompile.graphs.types import Bucket, Limits
from npucompile.runtime.request import Request, Sampling
from npucompile.runtime.rng import uniform
from npucompile.runtime.scheduler.advance import commit, launch, submit
from npucompile.runtime.scheduler.kv_cache_manager import Holdings
from npucompile.runtime.scheduler.pools import OwnershipError
from npucompile.runtime.scheduler.schedule import Policy, State, plan
from npucompile.runtime.step_outputs import Sampled

LIMITS = Limits(page_size=4, num_pages=9, num_slots=7, max_model_len=16, slots_per_request=2, drafts=1)
BUCKETS = (Bucket("prefill", 1, 8), Bucket("decode", 2, 2))


def fresh(*requests):
    state = State(Policy(LIMITS, BUCKETS))
    for one in requests:
        state = submit(state, one, 0.0)
    return state


def advance(state, holdings):
    """One step that gives one token; its inputs, and whose its rows are."""
    step = plan(state)
    inputs = holdings.inputs(step.bucket, step)
    results = [Sampled((1,) if turn.samples else ()) for turn in step.turns]
    state, _ = commit(launch(state, step, 0.0), step, results, 1.0)
    return state, inputs, [turn.request.id for turn in step.turns]


def test_rows_get_what_their_requests_own():
    a, b = Request("a", (1, 2, 3, 4, 5), 6, Sampling(1.0, seed=9), logprobs=0), Request("b", (6,), 6, speculative_tokens=0)
    holdings, state = Holdings(LIMITS, max_logprobs=3), fresh(a, b)
    while len(state.running) < 2 or plan(state).bucket.kind != "decode":
        state, _, _ = advance(state, holdings)
        holdings.check(state)
    said = len(state.running[0].generated)
    state, inputs, names = advance(state, holdings)
    assert sorted(names) == ["a", "b"]
    for row, name in enumerate(names):
        pages = list(holdings.pages.owned(name))
        assert inputs["page_table"][row, : len(pages)].tolist() == pages
        assert inputs["write_slots"][row].tolist() == list(holdings.slots.owned(name))
        assert inputs["seats"][row] == holdings.seats.owned(name)[0]
    row = {name: row for row, name in enumerate(names)}
    assert inputs["base"][row["a"]] == 5 + said - 1
    assert inputs["uniform"][row["a"]].tolist() == [uniform(9, said + i) for i in range(3)]
    assert inputs["uniform"][row["b"]].tolist() == [0, 0, 0]
    assert [inputs["drafts"][row[name]] for name in "ab"] == [1, 0]
    assert [inputs["logprobs"][row[name]] for name in "ab"] == [1, 0]


def test_a_prefill_starts_from_and_fills_the_first_slot_and_the_seat():
    holdings, state = Holdings(LIMITS), fresh(Request("a", (1, 2, 3, 4, 5, 6, 7, 8, 9, 10), 4, Sampling(1.0, seed=9)))
    for following, drawn in ((9, 0), (-1, 0)):
        state, inputs, _ = advance(state, holdings)
        slot, seat = holdings.slots.owned("a")[0], holdings.seats.owned("a")[0]
        assert (inputs["read_slots"].tolist(), inputs["write_slots"].tolist(), inputs["seats"].tolist()) == ([slot], [[slot]], [seat])
        assert inputs["next_tokens"].tolist() == [following]
        assert inputs["uniform"].tolist() == [[uniform(9, drawn)]]
        assert "logprobs" not in inputs


def test_pages_grow_before_the_step_that_needs_them_and_come_back_with_the_rest():
    holdings, state = Holdings(LIMITS), fresh(Request("a", (1, 2), 9))
    counts = []
    for _ in range(4):
        state, inputs, _ = advance(state, holdings)
        counts.append((len(holdings.pages.owned("a")), int((inputs["page_table"] > 0).sum())))
    # Prompt and drafts end at 4; the decode steps start at 2, 3, 4 and reach three further.
    assert counts == [(1, 1), (2, 2), (2, 2), (2, 2)]
    holdings.release("a")
    assert [pool.free_count for pool in (holdings.pages, holdings.slots, holdings.seats)] == [8, 6, 3]


def test_an_idle_group_runs_padding_and_owns_nothing():
    holdings = Holdings(LIMITS)
    inputs = holdings.inputs(BUCKETS[1], None)
    assert inputs["write_slots"].shape == (2, 2)
    assert not any(inputs[name].any() for name in ("seats", "page_table", "write_slots", "base"))
    holdings.check(fresh())


def test_what_the_scheduler_does_not_know_is_a_leak():
    holdings, state = Holdings(LIMITS), fresh(Request("a", (1,), 4))
    state, _, _ = advance(state, holdings)
    holdings.check(state)
    holdings.pages.allocate(1, "thief")
    with pytest.raises(OwnershipError, match=r"owners \['a', 'thief'\]; the scheduler has .* running requests \['a'\]"):
        holdings.check(state)
    holdings.release("thief")
    holdings.release("a")
    with pytest.raises(OwnershipError, match="has 8 free and owners"):
        holdings.check(state)


@pytest.mark.parametrize("pool", ["pages", "slots", "seats"])
def test_every_pool_is_compared(pool):
    holdings, state = Holdings(LIMITS), fresh(Request("a", (1,), 4))
    state, _, _ = advance(state, holdings)
    getattr(holdings, pool).free("a")
    with pytest.raises(OwnershipError, match="owners"):
        holdings.check(state)


@pytest.mark.parametrize("pool", ["pages", "slots", "seats"])
def test_who_holds_too_much_is_found(pool):
    holdings, state = Holdings(LIMITS), fresh(Request("a", (1,), 4))
    state, _, _ = advance(state, holdings)
    getattr(holdings, pool).allocate(1, "a")
    with pytest.raises(OwnershipError, match=r"free and owners \['a'\]; the scheduler has"):
        holdings.check(state)
