"""runtime/scheduler/state.py: a group counts the same whether its running requests are a batch or not."""

from __future__ import annotations

import pytest
from support.scheduling import add, all_decode, policy, request

from npucompile.runtime.scheduler.advance import cancel
from npucompile.runtime.scheduler.decode_batch import DecodeBatch
from npucompile.runtime.scheduler.steady import gathered

RULES = policy(decode=(4,), prefill=((4, 8),), pages=60, requests=3, page_size=2, length=20)


@pytest.mark.parametrize("names", ["a", "abc"])
def test_a_batch_counts_as_its_requests_do(names: str) -> None:
    single = all_decode(RULES, *(request(name, prompt=3 + i, max_tokens=9) for i, name in enumerate(names)))
    state = gathered(single)
    (group,), (expected,) = state.groups, single.groups
    assert isinstance(group.running, DecodeBatch)
    assert state == single
    assert group.used_pages == expected.used_pages == sum(live.num_pages for live in expected.running) > 0
    assert (group.free_pages(RULES.limits), group.free_slots(RULES.limits)) == (
        expected.free_pages(RULES.limits),
        expected.free_slots(RULES.limits),
    )
    assert group.decodable(RULES.limits) == expected.decodable(RULES.limits)
    arrivals = {group.running[0].arrival}
    assert group.without(arrivals) == expected.without(arrivals)
    assert group.without(()) is group
    assert cancel(state, arrivals, 1.0) == cancel(single, arrivals, 1.0)


def test_who_waits_for_a_slot_leaves_the_others_a_batch_and_who_does_not_ends_it() -> None:
    state = all_decode(RULES, *(request(name, max_tokens=9) for name in "ab"))
    assert isinstance(gathered(state).groups[0].running, DecodeBatch)
    # There are slots for three.
    admitted = add(state, request("c"))
    assert gathered(admitted) is admitted
    full = add(all_decode(RULES, *(request(name, max_tokens=9) for name in "abc")), request("d"))
    assert isinstance(gathered(full).groups[0].running, DecodeBatch)
