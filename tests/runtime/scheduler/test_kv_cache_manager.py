"""runtime/scheduler/kv_cache_manager.py: ownership follows the scheduled steps, and rows get the pages and slots of their requests."""

from __future__ import annotations

import pytest
from support.scheduling import fresh, sampled

from npucompile.graphs.types import Bucket, Limits
from npucompile.runtime.request import Request
from npucompile.runtime.scheduler.advance import commit, launch
from npucompile.runtime.scheduler.kv_cache_manager import KVCacheManager
from npucompile.runtime.scheduler.policy import Policy
from npucompile.runtime.scheduler.pools import OwnershipError
from npucompile.runtime.scheduler.schedule import schedule

LIMITS = Limits(page_size=4, num_pages=9, num_slots=7, max_model_len=16, slots_per_request=2, drafts=1)
BUCKETS = (Bucket("prefill", 1, 8), Bucket("decode", 2, 2))
RULES = Policy(LIMITS, BUCKETS)


def advance(state, manager):
    """Runs one step that samples one token for each row; returns the state, its inputs and the ids of its rows."""
    step = schedule(state)
    inputs = manager.inputs(step.bucket, step.groups[0])
    state, _ = commit(launch(state, step, 0.0), step, sampled(step, 1), 1.0)
    return state, inputs, [row.request.id for row in step.groups[0].rows]


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
