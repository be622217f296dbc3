"""The scheduler's state transitions: what submitting, cancelling, launching, committing and failing change.

Pure functions over the records of `state.py`. A step passes through twice: `launch` applies what is certain while it runs,
`commit` (or `fail`) its results. Steps are committed in the order in which they were launched. Between the two, the next step may be
launched and requests of the step may end; results for an ended request are dropped.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ...graphs.steps.table import kind_of
from ..request import DecodedRow, Event, Logprobs, TokenEvent
from ..step_outputs import SampledTokens
from .request_state import ComputedTokens, RequestState
from .scheduled_step import GroupStep, Reservation, ScheduledRequest, ScheduledStep, arrival_of
from .state import GroupState, SchedulerState
from .step_times import StepTimes
from .turns import OUTPUT_WEIGHT, Key, Turns, admitted, key_of, rank

GroupResults = Sequence[SampledTokens | None]
"""Results of the rows of one dp group; None for a request that has ended (`step_outputs.read_outputs`)."""

_decoded_row = functools.lru_cache(4096)(DecodedRow)
"""Equal rows are one record: each stays in the logs of its requests up to their ends."""


def submit(state: SchedulerState, *requests: RequestState) -> SchedulerState:
    """The state with new requests, each last in the queue of a group.

    Of the groups with the fewest requests, or at most half as many again and one, it is that which knows most of the prompt, by its caches
    or by rows of its pictures; among those, the one with the fewest requests, and then the fewest used pages.
    """
    loads = [(group.num_requests, group.used_pages) for group in state.groups]
    new: list[list[RequestState]] = [[] for _ in state.groups]
    for request in requests:
        chosen = _group_for(request, state.groups, loads)
        loads[chosen] = (loads[chosen][0] + 1, loads[chosen][1])
        new[chosen].append(request)
    groups = tuple(_joined(group, added) for group, added in zip(state.groups, new, strict=True))
    return replace(state, groups=groups, next_deadline_ms=min([state.next_deadline_ms, *(r.deadline_ms for r in requests)]))


def _joined(group: GroupState, new: Sequence[RequestState]) -> GroupState:
    if not new:
        return group
    turns = group.turns if group.num_requests else None
    if turns is None:
        # All that are here are of one priority and tenant, so that any of them stands for all.
        present = next(itertools.chain(group.running, group.waiting, new))
        if any(key_of(request) != key_of(present) for request in new):
            turns = Turns()
    return replace(group, waiting=(*group.waiting, *new), turns=turns)


def _group_for(request: RequestState, groups: Sequence[GroupState], loads: Sequence[tuple[int, int]]) -> int:
    most = min(loads)[0] * 3 // 2 + 1
    # With one group there is nothing to choose.
    known = [group.known_tokens(request) if len(groups) > 1 else 0 for group in groups]
    return min(range(len(groups)), key=lambda i: (-known[i] if loads[i][0] <= most else 0, loads[i]))


def cancel(state: SchedulerState, arrivals: Collection[int], now_ms: float) -> tuple[SchedulerState, tuple[Event, ...]]:
    """The state without the requests of these arrivals, and their last events; the others are not live any more."""
    return _drop(state, arrivals, "cancelled", now_ms)


def expire(state: SchedulerState, now_ms: float) -> tuple[SchedulerState, tuple[Event, ...]]:
    """The state without the requests whose deadlines have passed, and their last events."""
    if now_ms < state.next_deadline_ms:
        return state, ()
    requests = live(state)
    late = [request for request in requests if request.deadline_ms <= now_ms]
    events = tuple(request.finish_event("timeout", now_ms, _lateness(request, now_ms)) for request in late)
    state, _ = _drop(state, {request.arrival for request in late}, "timeout", now_ms)
    return replace(state, next_deadline_ms=min((request.deadline_ms for request in live(state)), default=math.inf)), events


def _lateness(request: RequestState, now_ms: float) -> str:
    allowed_ms = request.deadline_ms - request.submitted_ms
    state = "was waiting" if request.started_ms is None else f"had {len(request.output_token_ids)} tokens"
    first = "to its first token " if allowed_ms != request.request.timeout_ms else ""
    return f"the request has taken {now_ms - request.submitted_ms:.0f} ms; it was allowed {allowed_ms:.0f} ms {first}and {state}"


def reserve(state: SchedulerState, reserved: Sequence[Sequence[Reservation]]) -> SchedulerState:
    """The state once these waiting requests of each group have their pages and slots (`schedule.reservations`)."""
    groups = (
        _with_reserved(group, [item.state for item in own]) if own else group for group, own in zip(state.groups, reserved, strict=True)
    )
    return replace(state, groups=tuple(groups))


def landed(state: SchedulerState, arrivals: Collection[int], now_ms: float) -> SchedulerState:
    """The state once the pages of these parked requests are filled; those that have ended change nothing."""

    def begun(request: RequestState) -> RequestState:
        return request.landed(now_ms) if request.parked and request.arrival in arrivals else request

    groups = tuple(replace(group, running=tuple(map(begun, group.running))) for group in state.groups)
    deadlines = [r.deadline_ms for group in groups for r in group.running if r.arrival in arrivals]
    return replace(state, groups=groups, next_deadline_ms=min([state.next_deadline_ms, *deadlines]))


def unparked(state: SchedulerState, arrivals: Collection[int]) -> SchedulerState:
    """The state once these parked requests have given their pages back and wait to be computed; those that have ended change nothing."""

    def without(group: GroupState) -> GroupState:
        own = [request for request in group.running if request.parked and request.arrival in arrivals]
        return _displaced(group, [request.unparked() for request in own]) if own else group

    state = replace(state, groups=tuple(map(without, state.groups)))
    return replace(state, next_deadline_ms=min([state.next_deadline_ms, *(r.deadline_ms for r in live(state) if r.arrival in arrivals)]))


def launch(state: SchedulerState, step: ScheduledStep, now_ms: float) -> SchedulerState:
    """The state while a step runs that was scheduled from `state`: its preemptions, admissions and page growth are applied."""
    groups: list[GroupState] = []
    num_scheduled, kind = state.num_scheduled, kind_of(step.bucket)
    decodes = kind.decodes
    drafted = step.bucket.q_len - 1 if decodes else state.policy.limits.drafts
    for group, part in zip(state.groups, step.groups, strict=True):
        groups.append(_launch_group(group, part, num_scheduled, now_ms, drafted) if part != GroupStep() else group)
        num_scheduled += len(part.rows)
    return replace(
        state,
        groups=tuple(groups),
        prefill_steps=0 if decodes else state.prefill_steps + 1,
        prefill_ms=0.0 if decodes else state.prefill_ms + _predicted_ms(state, step),
        steps_in_flight=state.steps_in_flight + 1,
        num_scheduled=num_scheduled,
        encoded=state.encoded if decodes else kind.tower,
        acceptance=state.acceptance._replace(width=step.bucket.q_len) if decodes and state.policy.varies else state.acceptance,
    )


def _predicted_ms(state: SchedulerState, step: ScheduledStep) -> float:
    if state.policy.itl_target_ms is None:
        return 0.0
    cost = state.times.cost(kind_of(step.bucket), state.policy.price)
    return cost(step.shape) if cost else 0.0


def _measured(state: SchedulerState, step: ScheduledStep, took_ms: float | None) -> StepTimes:
    """The times after a step that took so long; None is not measured."""
    if took_ms is None:
        return state.times
    if step.sizes is not None and "Q" in kind_of(step.sizes).dynamic:
        return state.times.after_any_size(step.sizes, took_ms)
    return state.times.after(step.bucket, took_ms)


def computed(state: SchedulerState, step: ScheduledStep, results: Sequence[GroupResults]) -> list[Sequence[ComputedTokens]]:
    """What the rows of each group have computed, before `commit` ends some of them; arguments are those of `commit`."""
    by_group, most = list[Sequence[ComputedTokens]](), state.policy.limits.max_model_len
    for group, part, rows in zip(state.groups, step.groups, results, strict=True):
        requests = {request.arrival: request for request in group.running}
        by_group.append(
            [
                _computed_row(most, request, row, tokens)
                for row, tokens in zip(part.rows, rows, strict=True)
                if tokens is not None and (request := requests.get(row.state.arrival)) is not None
            ]
        )
    return by_group


def _computed_row(max_model_len: int, request: RequestState, row: ScheduledRequest, tokens: SampledTokens) -> ComputedTokens:
    output, _ = request.clip_output(tokens.token_ids, max_model_len)
    if request.unscored and not request.in_chunks:
        # Those of the prompt that the step scored are known now, as if they were output.
        output = (*tokens.token_ids[: request.unscored], *output)
    first = request.num_computed_tokens if row.state.decoding else None
    count = row.start + row.num_tokens if first is None else first + len(tokens.token_ids)
    return tuple.__new__(ComputedTokens, (request, output, count, tokens.not_finite, first))


def commit(
    state: SchedulerState, step: ScheduledStep, results: Sequence[GroupResults], now_ms: float, took_ms: float | None = None
) -> tuple[SchedulerState, tuple[Event, ...]]:
    """The state after a step that ran, and the events for the clients.

    Args:
        state: in which the step is the oldest in flight.
        results: of each group's rows.
        now_ms: when the results were known.
        took_ms: how long the step took, where the policy goes by that.
    """
    groups: list[GroupState] = []
    events: list[Event] = []
    decodes, name, most = kind_of(step.bucket).decodes, step.bucket.name, state.policy.limits.max_model_len
    for group, part, rows in zip(state.groups, step.groups, results, strict=True):
        if not any(rows):
            groups.append(group)
            continue
        by_arrival = dict(zip(map(arrival_of, part.rows), rows, strict=True))
        same_rows = functools.cache(functools.partial(_decoded_row, name, step.shape.batch - len(part.rows)))
        running: list[RequestState] = []
        served: dict[Key, int] = {}
        for request in group.running:
            tokens = by_arrival.get(request.arrival)
            if tokens is None:
                running.append(request)
                continue
            row = same_rows(tokens.num_drafts, len(tokens.token_ids) - 1)
            unfinished = _commit_row(request, tokens, row, decodes, most, now_ms, events)
            if unfinished is not None:
                running.append(unfinished)
            if group.turns is not None:
                count = len(tokens.token_ids) if decodes else min(len(tokens.token_ids), 1)
                served[key_of(request)] = served.get(key_of(request), 0) + OUTPUT_WEIGHT * count
        groups.append(replace(group, running=tuple(running), turns=group.turns.charged(served) if group.turns is not None else None))
    times = _measured(state, step, took_ms)
    acceptance = state.acceptance
    if decodes and state.policy.varies:
        verified = [(tokens.num_drafts, len(tokens.token_ids) - 1) for rows in results for tokens in rows if tokens is not None]
        acceptance = acceptance.after(verified, state.policy.limits.drafts)
    flying = state.steps_in_flight - 1
    return replace(state, groups=tuple(groups), steps_in_flight=flying, times=times, acceptance=acceptance), tuple(events)


def encoded(
    state: SchedulerState, step: ScheduledStep, failed: Mapping[str, str], now_ms: float, took_ms: float | None = None
) -> tuple[SchedulerState, tuple[Event, ...]]:
    """The state after an encode step, and the events for the clients; its rows go on with prefill steps.

    Args:
        state: in which the step is the oldest in flight.
        failed: why requests end whose pictures could not be encoded, by id.
        now_ms, took_ms: as of `commit`.
    """
    counts = Counter(segment.row.state.arrival for part in step.groups for segment in part.segments)
    groups = []
    for group in state.groups:
        running = tuple(r.encoded(counts[r.arrival]) if counts[r.arrival] and r.id not in failed else r for r in group.running)
        groups.append(replace(group, running=running))
    times = _measured(state, step, took_ms)
    state, events = replace(state, groups=tuple(groups), steps_in_flight=state.steps_in_flight - 1, times=times), list[Event]()
    for request in [request for request in live(state) if request.id in failed]:
        state, ended = _drop(state, {request.arrival}, "error", now_ms, failed[request.id])
        events += ended
    return state, tuple(events)


def fail(state: SchedulerState, step: ScheduledStep, message: str, now_ms: float) -> tuple[SchedulerState, tuple[Event, ...]]:
    """The state after a step in flight failed: the requests of all its rows end with reason "error", all others continue."""
    arrivals = {row.state.arrival for part in step.groups for row in part.rows}
    return _drop(replace(state, steps_in_flight=state.steps_in_flight - 1), arrivals, "error", now_ms, message)


def end(state: SchedulerState, request_id: str, message: str, now_ms: float, code: str | None) -> tuple[SchedulerState, tuple[Event, ...]]:
    """The state without this request, which ends with reason "error"."""
    return _drop(state, {request.arrival for request in live(state) if request.id == request_id}, "error", now_ms, message, code)


def fail_all(state: SchedulerState, message: str, now_ms: float) -> tuple[SchedulerState, tuple[Event, ...]]:
    """The state without any request: all end with reason "error"."""
    return _drop(state, {request.arrival for request in live(state)}, "error", now_ms, message)


def _launch_group(group: GroupState, part: GroupStep, num_scheduled: int, now_ms: float, drafted: int) -> GroupState:
    if part.preempted:
        group = _displaced(group, [request.preempted() for request in group.running if request.id in part.preempted])
    waiting, running, turns = group.waiting, group.running, group.turns
    # A row's state knows what is in the caches of a request that is admitted.
    launched = {
        row.state.arrival: row.state.decode_launched(row.num_pages, order, drafted)
        if row.state.decoding
        else row.state.prefill_launched(row.num_tokens, row.num_pages, order, now_ms, drafted)
        for order, row in enumerate(part.rows, num_scheduled)
    }
    count = len(part.admitted)
    if turns is None:
        waiting, running = waiting[count:], (*running, *waiting[:count])
    elif count:
        new = [row.state for row in part.rows[-count:]]
        turns = admitted(turns, waiting, new)
        waiting = tuple(request for request in waiting if request.arrival not in launched)
        running = tuple(sorted((*running, *new), key=rank))
    running = tuple([launched.get(request.arrival, request) for request in running])
    return replace(group, waiting=waiting, running=running, turns=turns)


def _displaced(group: GroupState, lost: Sequence[RequestState]) -> GroupState:
    """With these requests, which have lost their pages, before those that wait."""
    arrivals, waiting = {request.arrival for request in lost}, (*lost, *group.waiting)
    if group.turns is not None:
        waiting = tuple(sorted(waiting, key=lambda request: request.arrival))
    return replace(group, waiting=waiting, running=tuple(request for request in group.running if request.arrival not in arrivals))


def _with_reserved(group: GroupState, new: Sequence[RequestState]) -> GroupState:
    arrivals = {request.arrival for request in new}
    waiting = tuple(request for request in group.waiting if request.arrival not in arrivals)
    turns = None if group.turns is None else admitted(group.turns, group.waiting, new)
    running = (*group.running, *new)
    return replace(group, waiting=waiting, running=running if turns is None else tuple(sorted(running, key=rank)), turns=turns)


def _commit_row(
    request: RequestState, tokens: SampledTokens, row: DecodedRow, decodes: bool, max_model_len: int, now_ms: float, events: list[Event]
) -> RequestState | None:
    """The request after its row, None if that finished it; its events are put to the others."""
    scores = request.unscored and min(request.unscored, len(tokens.token_ids))
    output, reason = request.clip_output(tokens.token_ids, max_model_len)
    failure = tokens.failure if reason is None else ""
    if decodes:
        request = request.decode_committed(row, output, tokens.drafts)
    else:
        request = request.prefill_committed(row.bucket_name, output, row.padded_rows, now_ms, tokens.drafts)
    if scores or (output and request.record.first_token_ms is None):
        request = request.scored(scores, now_ms, bool(output))
    visible = output[:-1] if reason == "stop" else output
    wanted = request.request
    scored: tuple[Logprobs, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    if tokens.logprobs:
        scored, logprobs = _clipped(tokens.logprobs[:scores], wanted.prompt_logprobs), _clipped(tokens.logprobs[scores:], wanted.logprobs)
    if visible or scored:
        events.append(tuple.__new__(TokenEvent, (wanted.id, visible, logprobs and logprobs[: len(visible)], scored)))
    if failure:
        events.append(request.finish_event("error", now_ms, failure))
        return None
    if reason is None:
        return request
    end = request.finish_event(reason, now_ms)
    if reason == "stop" and logprobs and wanted.prompt_logprobs is not None:
        end = replace(end, ended_by=(output[-1], logprobs[len(visible)]))
    events.append(end)
    return None


def _clipped(logprobs: tuple[Logprobs, ...], most: int | None) -> tuple[Logprobs, ...]:
    """These log probabilities as one who wants so many of the most likely tokens gets them."""
    if most is None or not logprobs:
        return ()
    return logprobs if len(logprobs[0].top) <= most else tuple(entry._replace(top=entry.top[:most]) for entry in logprobs)


def live(state: SchedulerState) -> list[RequestState]:
    """All requests that have not ended."""
    return [request for group in state.groups for request in (*group.running, *group.waiting)]


def _drop(
    state: SchedulerState, arrivals: Collection[int], reason: str, now_ms: float, message: str | None = None, code: str | None = None
) -> tuple[SchedulerState, tuple[Event, ...]]:
    events = tuple(request.finish_event(reason, now_ms, message, code) for request in live(state) if request.arrival in arrivals)
    return replace(state, groups=tuple(group.without(arrivals) for group in state.groups)), events
