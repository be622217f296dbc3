"""The scheduler: decides the next step of all dp groups from the state of their requests.

Everything here is a pure function over frozen records: the same state gives the same step. Pages and slots are only counted;
`kv_cache_manager.py` knows which ones a request owns, and `advance.py` computes the next state.

Policy:
    Requests are admitted by priority, then in turns over tenants, then by arrival (`turns.py`); of one that waits for a resource, those
    behind it wait too. Where all are of one priority and tenant that is order of arrival, and running requests are older than waiting
    ones.
    A prefill step computes chunks of several prompts of each group, a row each: those in progress, most urgent first, then waiting ones
    that can be admitted, as many as the bucket has rows. `steps.sizes.choose_prefill` says which bucket that is: the first prompt
    gets a chunk as long as if it were alone, and others share its step where that costs no more than one step after the other.
    While any request decodes, at most `prefill_burst` prefill steps run between two decode steps, which bounds the gap between two
    tokens of a stream. With a target for that gap (`Policy.itl_target_ms`) they are as many, in buckets as large, as its time allows
    beside the decode step: measured times say so, and where they do not yet, or nothing fits, it is one step of the cheapest bucket. So
    the gap is at most the target, or the decode step and the cheapest prefill step, and prompts go on whatever the target.
    When more requests decode than the largest bucket holds, the least recently scheduled go first. Where decode buckets are of several
    widths, `draft_widths.py` says how many drafts are verified, of the rows of all groups alike.
    A request is admitted when a request's state slots are free, and pages for all its tokens and one step's candidates, plus one
    step's candidates for every running request. Without that reserve, a preempted request would be prefilled only to be preempted
    again.
    A decode step that lacks pages preempts the least urgent running request, among equals the youngest, until it has them, whether that
    decodes or is being prefilled. A preempted request returns to the front of those of its priority, and later prefills its prompt and
    the tokens it had generated.
    A group whose only requests to decode are less urgent than a prompt in progress, and lack pages, decodes nothing: that goes first.

A request that wants log probabilities of its prompt is prefilled up to the first position that it wants them of. Behind it score steps go
on: prefill steps that give them, in which others' prompts that come behind may have rows. Where there are none, decode steps sample each
token of the prompt as the only one that there is, and from then on as any other request's.

A request whose next token depends on what its output is (`Request.follows_output`) decodes only from tokens that are known, so it sits out
the step that is launched while its last one is in flight. A step has no more rows that need bitmasks or adjustments of their logits
(`Request.host_inputs`) than it takes of these, and the others wait for the next.

A step may be scheduled while the one before it is in flight. A prefill step has a known outcome, so the next one continues where it
ends. How many tokens a decode step produces (1 to Q) is known only on the device; the next step starts from the position that the
device stored in the request slot, and gets pages for the furthest position it can reach. A request whose steps in flight finish it,
however few tokens they produce, is not scheduled. Nothing is preempted while a step is in flight; a decode step that would need it
waits for the results.

All dp groups run every step together, in one bucket. Each follows this policy over its own requests, pages and slots, with two
exceptions: if any group can prefill, the step is a prefill step for all, and `prefill_burst` counts the steps of all; and the bucket of
a prefill step is chosen for the prompts of all groups together.

A request whose bitmask is not filled in time sits out decode steps until it is (`SchedulerState.unready`).

There is no deadlock: with nothing in flight, any live request leads to a step, or its bitmask is being filled. The most urgent running
request of a group is never preempted while another one runs, and alone it fits (see `Policy`). There is no starvation: every prefill step
has a row for the first prompt of each group that it can begin or go on with, and who has waited long enough goes before everybody
(`turns.py`).
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

from ...graphs.steps.decode import DECODE
from ...graphs.steps.encode import ENCODE
from ...graphs.steps.kind import StepKind
from ...graphs.steps.prefill import PREFILL
from ...graphs.steps.score import SCORE
from ...graphs.types import Bucket, Limits
from ..request import NO_INPUTS, RECEIVE, HostInputs
from ..steps.sizes import choose, choose_prefill, choose_sizes, tokens_for
from .checkpoints import CheckpointSlots, places
from .draft_widths import buckets_of_width
from .encoding import PromptChunk, chunk, encode_step, num_ready
from .picture_ledger import PictureRoom
from .policy import Policy
from .prefix_blocks import Block, Match
from .request_state import RequestState
from .scheduled_step import GroupStep, Reservation, ScheduledRequest, ScheduledStep
from .state import GroupState, SchedulerState
from .step_times import in_time
from .turns import in_turn

_last_scheduled: Callable[[RequestState], int] = attrgetter("last_scheduled")
_plain: Callable[[RequestState], bool] = attrgetter("request.plain")


def schedule(state: SchedulerState) -> ScheduledStep | None:
    """The next step.

    Returns:
        At least one row. None when there is nothing to run before the results of the steps in flight are known; with nothing in
        flight, exactly when no request is live but those that are not ready.
    """
    policy, limits = state.policy, state.policy.limits
    decodable = [group.decodable(limits, state.unready) for group in state.groups]
    most = max(map(len, decodable))
    bursts = policy.itl_target_ms is None and state.prefill_steps >= policy.prefill_burst
    if not (most and bursts) and (step := _prompt_step(state, most)):
        return step
    can_preempt = not state.steps_in_flight
    buckets = _decode_buckets(state, most, itertools.chain.from_iterable(decodable)) if most else ()
    parts = [
        _decode(policy, buckets, group, requests, can_preempt) if requests else None
        for group, requests in zip(state.groups, decodable, strict=True)
    ]
    if not can_preempt and any(requests and part is None for requests, part in zip(decodable, parts, strict=True)):
        return None
    chosen = [part[0] for part in parts if part is not None]
    if not chosen:
        # Older prompts keep the pages that all decode steps lack.
        return _prompt_step(state, 0)
    # The rows of a group fit every larger bucket unchanged.
    bucket, groups = max(chosen), tuple(GroupStep() if part is None else part[1] for part in parts)
    return ScheduledStep(bucket, groups, replace(bucket, batch=len(groups[0].rows)) if DECODE.name in policy.any_size else None)


def wanted_bucket(state: SchedulerState, missing: Iterable[Bucket]) -> Bucket | None:
    """The one of the missing buckets that the next step would take if it could run; None where it takes one that can."""
    wanted = frozenset(missing)
    step = schedule(replace(state, policy=replace(state.policy, buckets=(*state.policy.buckets, *wanted))))
    return step.bucket if step is not None and step.bucket in wanted else None


class _Prompt(NamedTuple):
    """A request that the next prefill step can go on with, or begin.

    Attributes:
        num_pages: pages it then holds.
        match: what is known of one that begins.
        stop: tokens computed where the chunk should end at the latest, to keep the state; 0 for nowhere.
    """

    request: RequestState
    num_pages: int
    match: Match | None = None
    stop: int = 0

    @property
    def remaining(self) -> int:
        """Tokens up to the end of the prompt, or to where the chunk should end or score steps go on; at least 1."""
        request = self.request
        end = self.stop or request.num_to_prefill
        return (end if self.scored else min(end, request.score_from)) - request.num_computed_tokens

    @property
    def scored(self) -> bool:
        """Whether its chunk is that of a score step."""
        return self.request.num_computed_tokens >= self.request.score_from


def _prompt_step(state: SchedulerState, streams: int) -> ScheduledStep | None:
    """The next step that does not decode, for all groups' first prompts; None where no group has one that is in progress or can be
    admitted, or where there is no time for them.

    Args:
        streams: requests that decode, in the group with most of them; 0 where none waits for this step.
    """
    policy = state.policy
    by_group = [_prompts(policy, group) for group in state.groups]
    if not any(own for own, _ in by_group):
        return None
    if policy.encode_buckets:
        chunks = [_chunks(policy, group, own) for group, (own, _) in zip(state.groups, by_group, strict=True)]
        ready = [num_ready(own) for own in chunks]
        affordable = functools.partial(_in_time, state, ENCODE, streams and streams + max(map(len, chunks)))
        # In turns, so that prompts that have their rows do not wait for all the pictures of others.
        if not (state.encoded and any(ready)) and (step := encode_step(policy.encode_buckets, chunks, affordable)):
            return step
        by_group = [(own[:count], slots) for (own, slots), count in zip(by_group, ready, strict=True)]
        if not any(ready):
            return None
    kind = SCORE if any(own and own[0].scored for own, _ in by_group) else PREFILL
    if kind is PREFILL:
        by_group = [(list(itertools.takewhile(lambda prompt: not prompt.scored, own)), slots) for own, slots in by_group]
    legal = _in_time(state, kind, streams and streams + max(len(own) for own, _ in by_group), kind.among(policy.buckets))
    if not legal:
        return None
    remaining, any_size = [[prompt.remaining for prompt in own] for own, _ in by_group], kind.name in policy.any_size
    if any_size:
        sizes = choose_sizes(remaining[0], legal[0].tokens, policy.longest_chunk(kind), policy.fixed_price)
        bucket = replace(sizes, kind=kind.name)
    else:
        measured = state.times.cost(kind, policy.price) if policy.measured else None
        bucket = choose_prefill(legal, remaining, measured or policy.price, _between(state, streams, measured is not None), kind)
    parts = tuple(_prefill_part(bucket, own[: bucket.batch], slots) for own, slots in by_group)
    if not any_size:
        return ScheduledStep(bucket, parts)
    # A chunk may end earlier, where a state is kept.
    sizes = replace(bucket, q_len=max(row.num_tokens for row in parts[0].rows))
    return ScheduledStep(policy.holding(sizes), parts, sizes)


def _in_time(state: SchedulerState, kind: StepKind, streams: int, buckets: Sequence[Bucket]) -> Sequence[Bucket]:
    """The buckets of a kind that leave time for the next decode step (`in_time`); where sizes are values, one that has as many tokens as
    there is time for.

    Args:
        streams: requests of that step at most, in the group with most of them; 0 where none waits.
    """
    policy, target_ms, any_size = state.policy, state.policy.itl_target_ms, kind.name in state.policy.any_size
    if not streams or target_ms is None or not buckets:
        return (kind.bucket(1, policy.most_tokens(kind)),) if any_size else buckets
    left_ms, first = target_ms - state.prefill_ms - _decode_ms(state, streams), not state.prefill_steps
    if any_size:
        rate = state.times.rate(kind, policy.price)
        tokens = min(policy.most_tokens(kind), tokens_for(left_ms / rate, policy.fixed_price)) if rate and left_ms > 0 else 0
        least = policy.least_tokens(kind)
        return (kind.bucket(1, max(tokens, least)),) if tokens >= least or first else ()
    return in_time(buckets, state.times.cost(kind, policy.price), policy.price, left_ms, first)


def _chunks(policy: Policy, group: GroupState, prompts: Sequence[_Prompt]) -> list[PromptChunk]:
    """What the prompts of a group may compute in the next step, whichever bucket it takes."""
    rows = [ScheduledRequest(prompt.request, prompt.num_pages, 0, prompt.match) for prompt in prompts]
    pairs = zip(rows, prompts, strict=True)
    return [chunk(group.pictures, row, min(prompt.remaining, policy.longest_chunk(PREFILL, SCORE))) for row, prompt in pairs]


def _between(state: SchedulerState, streams: int, measured: bool) -> float:
    """What the decode steps between two prefill steps cost while so many requests decode, in ms or in tokens.

    With a target for the time between tokens it is nothing: if there is time for one step, there is time for several that take less.
    """
    policy = state.policy
    if not streams or policy.itl_target_ms is not None:
        return 0.0
    bucket = choose(_decode_buckets(state, streams), streams)
    return (state.times.decode_ms(bucket) if measured else policy.price(bucket)) / policy.prefill_burst


def _decode_ms(state: SchedulerState, streams: int) -> float:
    """What a decode step of so many requests takes at most."""
    return state.times.decode_ms(choose(_decode_buckets(state, streams), streams))


def _prefill_part(bucket: Bucket, prompts: Sequence[_Prompt], slots: CheckpointSlots) -> GroupStep:
    chunks = [slots.chunk(p.request.num_computed_tokens, p.stop, p.request.num_to_prefill, min(bucket.q_len, p.remaining)) for p in prompts]
    rows = tuple(
        ScheduledRequest(p.request, p.num_pages, c.num_tokens, p.match, c.checkpoint) for p, c in zip(prompts, chunks, strict=True)
    )
    # A running request holds pages, a waiting one none.
    return GroupStep(rows, admitted=tuple(p.request.id for p in prompts if not p.request.num_pages))


def _prompts(policy: Policy, group: GroupState) -> tuple[list[_Prompt], CheckpointSlots]:
    """The first prompts that a step can compute: those in progress, then those that can be admitted together with all before them. And
    the slots that are left for checkpoints.
    """
    limits, most = policy.limits, policy.max_prompts
    begun = (request for request in group.running if not (request.decoding or request.parked))
    prompts = [_Prompt(request, request.num_pages) for request in itertools.islice(begun, most)]
    running, pages, slots = len(group.running), group.free_pages(limits), group.free_slots(limits)
    tails, room = set[Block](), PictureRoom(group.pictures)
    for request in _first_waiting(policy, group, most - len(prompts)):
        if request.request.handover == RECEIVE:
            # It gets its pages before the step is chosen, or waits for them (`reservations`).
            break
        match = _usable(group.prefixes.match(request), limits, slots, tails) if group.prefixes else None
        own, needed = policy.pages_to_prefill(request), limits.slots_per_request + (match is not None and _holds_more(match))
        new = own - (match.pinned_pages if match else 0)
        # Last, as it takes the rows.
        fits = slots >= needed and _has_room(policy, running, new, pages)
        if not fits or not room.takes(request.request, match.num_tokens(limits.page_size) if match else 0):
            break
        prompts.append(_Prompt(_resumed(policy, group, request, match), own, match))
        tails |= {match.tail} if match is not None and match.tail is not None else set()
        running, pages, slots = running + 1, pages - new, slots - needed
    # Where a prompt finds no bitmask or adjustment left, it and all behind it wait.
    prompts = prompts[: sum(itertools.takewhile(lambda fits: fits, _fits([prompt.request for prompt in prompts], limits)))]
    if group.prefixes is None or not group.prefixes.recurrent:
        return prompts, CheckpointSlots(limits.page_size, 0, 0)
    unused = limits.num_slots - 1 - running * limits.slots_per_request - group.prefixes.num_checkpoints
    checkpoints = CheckpointSlots(limits.page_size, slots, unused)
    return [prompt._replace(stop=checkpoints.stop(prompt.request.checkpoints)) for prompt in prompts], checkpoints


def _has_room(policy: Policy, running: int, new: int, pages: int) -> bool:
    """Whether one more request can run beside so many, with so many new pages of those that are free: all have a reserve."""
    return running + 1 < policy.limits.num_request_slots and new + running * policy.pages_for(policy.candidates) <= pages


def reservations(policy: Policy, group: GroupState) -> list[Reservation]:
    """The first waiting requests of a group, as long as they are to be received and there are pages and slots for them."""
    limits, reserved = policy.limits, list[Reservation]()
    running, pages, slots = len(group.running), group.free_pages(limits), group.free_slots(limits)
    for request in _first_waiting(policy, group, len(group.waiting)):
        if request.request.handover != RECEIVE:
            break
        # A state comes with the pages, so it need not be known here.
        blocks = group.prefixes.match(request).blocks if group.prefixes else ()
        match, own = Match(blocks, len(blocks)), policy.pages_to_prefill(request)
        new = own - match.pinned_pages
        if slots < limits.slots_per_request or not _has_room(policy, running, new, pages):
            break
        reserved.append(Reservation(request.reserved(own, match.num_tokens(limits.page_size)), match))
        running, pages, slots = running + 1, pages - new, slots - limits.slots_per_request
    return reserved


def _usable(match: Match, limits: Limits, slots: int, tails: Collection[Block]) -> Match:
    """What is known of a prompt, as far as it can begin from there: not where another request of the step takes the tail, and not where
    the slot of the state is one of those that it needs."""
    match = match.without_tail() if match.tail in tails else match
    return match._replace(depth=0, tail=None) if slots < limits.slots_per_request + _holds_more(match) else match


def _holds_more(match: Match) -> bool:
    """Whether a state is read that nothing holds yet, so that its slot is not free in the step."""
    return match.checkpoint is not None and not match.checkpoint.holds


def _resumed(policy: Policy, group: GroupState, request: RequestState, match: Match | None) -> RequestState:
    """The request as it is admitted."""
    if match is None or group.prefixes is None:
        return request
    page_size = policy.limits.page_size
    checkpoints = places(match, request.num_to_prefill, page_size, policy.cheapest_prefill) if group.prefixes.recurrent else ()
    return request.resumed(match.num_tokens(page_size), checkpoints)


def _first_waiting(policy: Policy, group: GroupState, most: int) -> Iterable[RequestState]:
    """Up to so many of the waiting requests, in the order in which they are admitted."""
    if group.turns is None:
        return group.waiting[:most]
    # Ordering the queue costs time, and without free state slots none of it can be admitted: sort only as many as there are slots for.
    most = min(most, group.free_slots(policy.limits) // policy.limits.slots_per_request)
    return itertools.islice(in_turn(group.turns, group.waiting, policy.ageing, group.cached_tokens), most) if most else ()


def _decode_buckets(state: SchedulerState, streams: int, requests: Iterable[RequestState] = ()) -> Sequence[Bucket]:
    """The decode buckets of the width that a step should have.

    Args:
        streams: requests that decode, in the group with most of them.
        requests: of all groups, where they are known; else each of them wants all drafts verified.
    """
    policy = state.policy
    most = Counter(map(policy.wanted_drafts, requests)) if policy.varies else {}
    return buckets_of_width(policy, state.times, state.acceptance, streams, most or {policy.limits.drafts: 1})


def _decode(
    policy: Policy, buckets: Sequence[Bucket], group: GroupState, requests: Sequence[RequestState], can_preempt: bool
) -> tuple[Bucket, GroupStep] | None:
    """A step in one of these buckets of the least recently scheduled of the requests; None where they lack pages, and preempting is not
    allowed or would leave none of them because prompts in progress are older.
    """
    running, free, freed = list[RequestState](), group.free_pages(policy.limits), 0
    preempted: list[str] = []
    while requests:
        requests = sorted(requests, key=_last_scheduled)
        if not all(map(_plain, requests)):
            requests = [request for request, fits in zip(requests, _fits(requests, policy.limits), strict=True) if fits]
        bucket = choose(buckets, len(requests))
        rows, new = _decode_rows(policy, bucket, requests[: bucket.batch])
        if new <= free:
            return bucket, GroupStep(rows, tuple(preempted))
        if not can_preempt:
            return None
        if not preempted:
            # Nobody else may write to the pages of a handover.
            running = [request for request in group.running if not request.parked]
        victim = running.pop()
        preempted.append(victim.id)
        freed += victim.num_pages
        free = group.free_pages(policy.limits) + freed - (group.prefixes.still_used(preempted) if group.prefixes else 0)
        requests = [request for request in requests if request.arrival != victim.arrival]
    return None


def _fits(requests: Iterable[RequestState], limits: Limits) -> list[bool]:
    """Whether a step has the bitmasks and adjustments of each request beside those of the ones before it that it has them of."""
    left, fits = HostInputs(limits.bitmasks, limits.logit_adjustments, limits.logit_adjustments), []
    for request in requests:
        needed = request.host_inputs
        remaining = left if needed is NO_INPUTS else left.less(needed)
        left = left if remaining is None else remaining
        fits.append(remaining is not None)
    return fits


def _decode_rows(policy: Policy, bucket: Bucket, requests: Iterable[RequestState]) -> tuple[tuple[ScheduledRequest, ...], int]:
    """The rows of requests, and how many pages they lack. Most have the pages of the step before, which is found by one comparison."""
    rows, new, page_size, Q = list[ScheduledRequest](), 0, policy.limits.page_size, policy.candidates
    most, last = min(policy.limits.drafts, bucket.q_len - 1), 2 * Q - 1
    for request in requests:
        pages, wanted, drafts = request.num_pages, request.request.speculative_tokens, min(request.drafted, most)
        if request.num_computed_tokens + request.steps_in_flight * Q + last > pages * page_size:
            needed = max(pages, policy.pages_to_decode(request))
            new, pages = new + needed - pages, needed
        tokens = 1 + (drafts if wanted is None else min(drafts, wanted))
        rows.append(tuple.__new__(ScheduledRequest, (request, pages, tokens, None, False)))
    return tuple(rows), new
