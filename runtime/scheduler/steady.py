"""Steps of groups in which plain requests decode and nothing else can go on: they are decided and applied for a whole batch at once.

`gathered` makes batches, `schedule` gives the step that `schedule.schedule` would, and `committed` what `advance.commit` would. Where a
request comes to its end, pages are lacking, or a prompt can go on, they do nothing, and those look at each request.
"""

from __future__ import annotations

from dataclasses import replace

from ...graphs.types import Bucket
from ..buckets import choose, padded_rows
from ..request import TokenEvent, token_events
from ..step_outputs import BatchTokens
from .decode_batch import DecodeBatch, batch_of
from .policy import Policy
from .scheduled_step import DecodeRows, GroupStep, ScheduledStep
from .state import GroupState, SchedulerState
from .turns import OUTPUT_WEIGHT, Key, key_of


def gathered(state: SchedulerState) -> SchedulerState:
    """The same state, with the running requests of each group as a batch, if the groups do nothing but decode plain requests."""
    if not all(map(_admits_nobody, [state.policy] * len(state.groups), state.groups)):
        return state
    groups = []
    for group in state.groups:
        running = group.running
        batch = running if isinstance(running, DecodeBatch) else batch_of(state.policy, running, state.steps_in_flight)
        if batch is None and running:
            return state
        groups.append(group if batch is None or batch is running else replace(group, running=batch))
    if all(new is old for new, old in zip(groups, state.groups, strict=True)):
        return state
    return replace(state, groups=tuple(groups))


def schedule(state: SchedulerState) -> ScheduledStep | None:
    """The next step of batches; None where something else may be next."""
    parts: list[GroupStep] = []
    for group in state.groups:
        if not group.running and not group.waiting:
            parts.append(GroupStep())
            continue
        rows = _rows(state.policy, group, group.running) if isinstance(group.running, DecodeBatch) else None
        if rows is None:
            return None
        parts.append(GroupStep(rows))
    most = max([len(part.rows) for part in parts])
    return ScheduledStep(choose(state.policy.decode_buckets, most), tuple(parts)) if most else None


def launched(group: GroupState, rows: DecodeRows, first_scheduled: int) -> GroupState:
    """The group once the step with these rows is launched, which was scheduled from it."""
    running = rows.batch.launched(rows.num_pages, rows.used_pages, first_scheduled)
    return GroupState(group.waiting, running, group.turns, group.prefixes)


def committed(group: GroupState, bucket: Bucket, tokens: BatchTokens) -> tuple[GroupState, list[TokenEvent]]:
    """The group after a step of its batch that sampled these tokens, and the events for the clients."""
    assert isinstance(group.running, DecodeBatch)
    members, turns = group.running.members, group.turns
    batch = group.running.committed(bucket.name, padded_rows(bucket, len(tokens)), tokens.token_ids, tokens.counts, tokens.verified)
    ids, token_ids = members.urgent_first(members.ids), members.urgent_first(tokens.token_ids)
    if tokens.logprobs is None:
        events = token_events(ids, token_ids)
    else:
        logprobs = members.urgent_first(tokens.logprobs)
        events = [TokenEvent(name, new, entries) for name, new, entries in zip(ids, token_ids, logprobs, strict=True)]
    if turns is not None:
        served: dict[Key, int] = {}
        for state, new in zip(members.urgent_first(members.states), token_ids, strict=True):
            served[key_of(state)] = served.get(key_of(state), 0) + OUTPUT_WEIGHT * len(new)
        turns = turns.charged(served)
    return GroupState(group.waiting, batch, turns, group.prefixes), events


def _admits_nobody(policy: Policy, group: GroupState) -> bool:
    """Whether no waiting request can be admitted while all that run do: none waits, or there are no slots."""
    limits, running = policy.limits, len(group.running)
    if not group.waiting or running + 1 >= limits.num_request_slots:
        return True
    return limits.num_slots - 1 - running * limits.slots_per_request < limits.slots_per_request


def _rows(policy: Policy, group: GroupState, batch: DecodeBatch) -> DecodeRows | None:
    """A row for each request; None where a prompt may be next, a request needs none, or pages are lacking."""
    limits, Q, progress = policy.limits, policy.candidates, batch.progress
    computed, in_flight = progress.num_computed, progress.steps_in_flight
    if not _admits_nobody(policy, group) or batch.may_end(in_flight):
        return None
    # As Policy.pages_to_decode has it.
    reach, num_pages, used = computed + (in_flight * Q + 2 * Q - 1), progress.num_pages, progress.used_pages
    short = (reach > num_pages * limits.page_size).nonzero()[0].tolist()
    if short:
        num_pages = num_pages.copy()
        for i in short:
            used -= int(num_pages[i])
            num_pages[i] = policy.pages_for(int(reach[i]))
            used += int(num_pages[i])
        if used - progress.used_pages > group.free_pages(limits):
            return None
    return DecodeRows(batch, num_pages, used, short)
