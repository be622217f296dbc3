"""runtime/scheduler/state.py: what a group counts of its requests."""

from __future__ import annotations

from support.scheduling import add, all_decode, policy, request

RULES = policy(decode=(4,), prefill=((4, 8),), pages=60, requests=3, page_size=2, length=20)


def test_a_group_counts_pages_and_slots_of_running_requests_alone() -> None:
    group = add(all_decode(RULES, *(request(name, prompt=3 + i, max_tokens=9) for i, name in enumerate("abc"))), request("d")).groups[0]
    used = sum(running.num_pages for running in group.running)
    assert group.num_requests == 4
    assert group.used_pages == used > 0
    assert (group.free_pages(RULES.limits), group.free_slots(RULES.limits)) == (59 - used, 0)
    first, *others = group.running
    left = group.without({first.arrival, group.waiting[0].arrival})
    assert (left.running, left.waiting) == (tuple(others), ())
    assert group.without(()) is group
    assert group.decodable(RULES.limits, {first.arrival}) == tuple(others)
