"""runtime/scheduler/kv_cache_manager.py: ownership follows the scheduled steps, and rows get the pages and slots of their requests."""

from __future__ import annotations

import pytest
from support.scheduling import fresh, sampled

from npucompile.graphs.types import Bucket, Limits
from npucompile.runtime.request import Request, Sampling
from npucompile.runtime.rng import random_number
from npucompile.runtime.scheduler.advance import commit, launch
from npucompile.runtime.scheduler.kv_cache_manager import KVCacheManager
from npucompile.runtime.scheduler.policy import Policy
from npucompile.runtime.scheduler.pools import OwnershipError
from npucompile.runtime.scheduler.schedule import schedule
from npucompile.runtime.scheduler.scheduled_step import GroupStep

LIMITS = Limits(page_size=4, num_pages=9, num_slots=7, max_model_len=16, slots_per_request=2, drafts=1)
BUCKETS = (Bucket("prefill", 1, 8), Bucket("decode", 2, 2))
RULES = Policy(LIMITS, BUCKETS)


def advance(state, manager):
    """Runs one step that samples one token for each row; returns the state, its inputs and the ids of its rows."""
    step = schedule(state)
    inputs = manager.inputs(step.bucket, step.groups[0])
    state, _ = commit(launch(state, step, 0.0), step, sampled(step, 1), 1.0)
    return state, inputs, [row.request.id for row in step.groups[0].rows]


def test_rows_get_what_their_requests_own():
    a, b = Request("a", (1, 2, 3, 4, 5), 6, Sampling(1.0, seed=9), logprobs=0), Request("b", (6,), 6, speculative_tokens=0)
    manager, state = KVCacheManager(LIMITS, max_logprobs=3), fresh(RULES, a, b)
    while len(state.groups[0].running) < 2 or schedule(state).bucket.kind != "decode":
        state, _, _ = advance(state, manager)
        manager.check(state.groups[0])
    generated = len(state.groups[0].running[0].output_token_ids)
    state, inputs, names = advance(state, manager)
    assert sorted(names) == ["a", "b"]
    for row, name in enumerate(names):
        pages = list(manager.pages.owned(name))
        assert inputs["page_table"][row, : len(pages)].tolist() == pages
        assert inputs["state_slots_out"][row].tolist() == list(manager.state_slots.owned(name))
        assert inputs["request_slots"][row] == manager.request_slots.owned(name)[0]
    row = {name: row for row, name in enumerate(names)}
    assert inputs["base"][row["a"]] == 5 + generated - 1
    assert inputs["uniform"][row["a"]].tolist() == [random_number(9, generated + i) for i in range(3)]
    assert inputs["uniform"][row["b"]].tolist() == [0, 0, 0]
    assert [inputs["drafts"][row[name]] for name in "ab"] == [1, 0]
    assert [inputs["logprobs"][row[name]] for name in "ab"] == [1, 0]


def test_a_prefill_starts_from_and_fills_the_first_state_slot_and_the_request_slot():
    manager, state = KVCacheManager(LIMITS), fresh(RULES, Request("a", (1, 2, 3, 4, 5, 6, 7, 8, 9, 10), 4, Sampling(1.0, seed=9)))
    for next_token, index in ((9, 0), (-1, 0)):
        state, inputs, _ = advance(state, manager)
        slot, request_slot = manager.state_slots.owned("a")[0], manager.request_slots.owned("a")[0]
        assert (inputs["state_slots_in"].tolist(), inputs["state_slots_out"].tolist(), inputs["request_slots"].tolist()) == (
            [slot],
            [[slot]],
            [request_slot],
        )
        assert inputs["next_tokens"].tolist() == [next_token]
        assert inputs["uniform"].tolist() == [[random_number(9, index)]]
        assert "logprobs" not in inputs


def test_pages_grow_before_the_step_that_needs_them_and_come_back_with_the_rest():
    manager, state = KVCacheManager(LIMITS), fresh(RULES, Request("a", (1, 2), 9))
    counts = []
    for _ in range(4):
        state, inputs, _ = advance(state, manager)
        counts.append((len(manager.pages.owned("a")), int((inputs["page_table"] > 0).sum())))
    # Prompt and drafts end at 4; the decode steps start at 2, 3, 4 and reach three further.
    assert counts == [(1, 1), (2, 2), (2, 2), (2, 2)]
    manager.release("a")
    assert [pool.free_count for pool in (manager.pages, manager.state_slots, manager.request_slots)] == [8, 6, 3]


def test_an_idle_group_runs_padding_and_owns_nothing():
    manager = KVCacheManager(LIMITS)
    inputs = manager.inputs(BUCKETS[1], GroupStep())
    assert inputs["state_slots_out"].shape == (2, 2)
    assert not any(inputs[name].any() for name in ("request_slots", "page_table", "state_slots_out", "base"))
    manager.check(fresh(RULES).groups[0])


def test_what_the_scheduler_does_not_know_is_a_leak():
    manager, state = KVCacheManager(LIMITS), fresh(RULES, Request("a", (1,), 4))
    state, _, _ = advance(state, manager)
    manager.check(state.groups[0])
    manager.pages.allocate(1, "thief")
    with pytest.raises(OwnershipError, match=r"owners \['a', 'thief'\]; the scheduler has .* running requests \['a'\]"):
        manager.check(state.groups[0])
    manager.release("thief")
    manager.release("a")
    with pytest.raises(OwnershipError, match="has 8 free and owners"):
        manager.check(state.groups[0])


@pytest.mark.parametrize("pool", ["pages", "state_slots", "request_slots"])
@pytest.mark.parametrize("spoil", [lambda pool: pool.free("a"), lambda pool: pool.allocate(1, "a")], ids=["too little", "too much"])
def test_a_request_that_owns_too_little_or_too_much_is_found_in_every_pool(pool, spoil):
    manager, state = KVCacheManager(LIMITS), fresh(RULES, Request("a", (1,), 4))
    state, _, _ = advance(state, manager)
    spoil(getattr(manager, pool))
    with pytest.raises(OwnershipError, match=r"free and owners .*; the scheduler has"):
        manager.check(state.groups[0])
