"""Turns the requests at hand into the next step.

Everything here is a pure function over frozen records: the same state gives the same step. Pages, slots and seats are only
counted; which ones they are is the pools' business (`pages.py`). What becomes of the records is `transitions.py`'s.

Policy:
    Order of arrival is the only priority. Running requests are always older than waiting ones.
    One prompt is prefilled at a time, in chunks; while anything decodes, at most `prefill_burst` chunks run between two
    decode steps, so a stream waits for at most that many chunks between two of its tokens.
    When more requests decode than the largest bucket holds, those served longest ago go first.
    A request is admitted when a group of slots is free, and pages for all its tokens and a step's candidates, plus for every
    running request the pages of one step's candidates: without that reserve a preempted request would be prefilled only to be
    preempted again.
    A decode step that lacks pages preempts the youngest running request until it has them; that one goes back to the
    front of the queue and later prefills its prompt and what it had generated.

A step may be planned while the one before it is in flight. Prefill steps do what they say, so the next one goes on from where they
will end. Of a decode step only the device knows how many tokens it gives, 1 to Q; the next one starts from the seat that it leaves
there, and has pages for the furthest it can reach. A request that ends with what is in flight, however little that gives, has no turn.
Nothing is preempted while anything is in flight: then there is no plan until its outcome is known.

Groups that step together (`plan_together`) each follow this policy over their own requests, pages and slots, but for one thing: when
any of them may prefill, all of them prefill or rest, and `prefill_burst` counts the steps of all.

No deadlock: while nothing is in flight any request that is live gives a plan; the oldest running request is never preempted while
another runs, and alone it fits (see `Policy`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ...graphs.errors import SpecError
from ...graphs.types import Bucket, Limits
from ..buckets import choose, choose_prefill, of_kind
from ..request import Request
from .request_state import Live


@dataclass(frozen=True)
class Policy:
    """The sizes that decisions depend on.

    Attributes:
        prefill_burst: most prefill steps between two decode steps while any request decodes.

    Raises:
        SpecError: when a request of max_model_len could never be served, a kind of bucket is missing, or a decode bucket or the
            slots of a request do not fit the drafts.
    """

    limits: Limits
    buckets: tuple[Bucket, ...]
    prefill_burst: int = 1

    def __post_init__(self) -> None:
        limits = self.limits
        if self.prefill_burst < 1:
            raise SpecError(f"prefill_burst is {self.prefill_burst}; legal is at least 1")
        if limits.num_pages - 1 < limits.pages_per_request:
            raise SpecError(
                f"{limits.num_pages} pages leave {limits.num_pages - 1} beside the null page; one request of max_model_len "
                f"{limits.max_model_len} takes {limits.pages_per_request}, so legal is at least {limits.pages_per_request + 1}"
            )
        if limits.slots_per_request != self.candidates:
            raise SpecError(
                f"{limits.slots_per_request} state slots a request with {limits.drafts} drafts; where requests are decoded, legal is "
                f"{self.candidates}, one for each candidate"
            )
        if limits.num_slots - 1 < limits.slots_per_request:
            raise SpecError(
                f"{limits.num_slots} state slots leave {limits.num_slots - 1} beside the null slot; one request takes "
                f"{limits.slots_per_request}, so legal is at least {limits.slots_per_request + 1}"
            )
        of_kind(self.buckets, "prefill")
        for bucket in of_kind(self.buckets, "decode"):
            if bucket.q_len != self.candidates:
                drafts = f"with {limits.drafts} drafts, legal is {self.candidates}"
                raise SpecError(f"bucket {bucket.name} decodes {bucket.q_len} tokens per request; {drafts}")

    @property
    def candidates(self) -> int:
        """Q of decode: a request's last token and its drafts."""
        return self.limits.drafts + 1

    def pages_for(self, tokens: int) -> int:
        """Pages that hold this many tokens of one request, or as many as it may have."""
        return -(-min(tokens, self.limits.max_model_len) // self.limits.page_size)

    def pages_to_prefill(self, live: Live) -> int:
        """Pages for all known tokens, and for those drafted at their end."""
        return self.pages_for(live.total + self.candidates)

    def pages_to_decode(self, live: Live) -> int:
        """Pages for the next decode step: where it starts at the latest, all candidates, and the drafts after them."""
        Q = self.candidates
        return self.pages_for(live.computed + live.in_flight * Q + 2 * Q - 1)


@dataclass(frozen=True, slots=True)
class State:
    """All live requests, oldest first in both lists.

    Attributes:
        arrivals: requests ever submitted.
        turns: turns ever given (see `Live.served`).
        burst: prefill steps since the last decode step, those in flight among them.
        in_flight: steps launched whose outcome is not known.
    """

    policy: Policy
    waiting: tuple[Live, ...] = ()
    running: tuple[Live, ...] = ()
    arrivals: int = 0
    turns: int = 0
    burst: int = 0
    in_flight: int = 0

    @property
    def used_pages(self) -> int:
        """Pages that running requests hold."""
        return sum(live.pages for live in self.running)

    @property
    def free_pages(self) -> int:
        """Pages that no request holds, the null page not among them."""
        return self.policy.limits.num_pages - 1 - self.used_pages

    @property
    def free_slots(self) -> int:
        """State slots that no request holds, the null slot not among them."""
        limits = self.policy.limits
        return limits.num_slots - 1 - len(self.running) * limits.slots_per_request

    @property
    def ready(self) -> tuple[Live, ...]:
        """Running requests that a decode step can go on with."""
        length = self.policy.limits.max_model_len
        return tuple(live for live in self.running if live.decoding and not live.surely_ends(length))


class Turn(NamedTuple):
    """One request's row of a step.

    Attributes:
        arrival: what the request is known by when the step's outcome is.
        pages: pages the request holds during the step; grown to this count before it.
        start: prefill: position of the first token to feed; decode: the smallest position at which the row can start.
        sample_index: place, among the request's generated tokens, of the first one that the row can sample.
        tokens: prefill: known tokens to feed. A decode step finds its candidates on the device.
        next_token: prefill: the known token after those; -1 where that one is sampled.
        drafts: decode: how many of its drafts are verified.
    """

    request: Request
    arrival: int
    pages: int
    start: int
    sample_index: int
    tokens: tuple[int, ...] = ()
    next_token: int = -1
    drafts: int = 0

    @property
    def samples(self) -> bool:
        """Whether what is sampled counts; false for a prefill chunk that is not the last."""
        return self.next_token < 0


@dataclass(frozen=True, slots=True)
class Step:
    """What to do next: free what `preempted` hold, give `admitted` its slots and seat, grow the turns' pages, run the bucket."""

    bucket: Bucket
    turns: tuple[Turn, ...]
    preempted: tuple[str, ...] = ()
    admitted: str | None = None


def plan(state: State) -> Step | None:
    """The next step of one group; None as for `plan_together`."""
    (step,) = plan_together((state,)) or (None,)
    return step


def plan_together(states: Sequence[State]) -> tuple[Step | None, ...] | None:
    """The next step of groups that run every step together, in one bucket.

    Args:
        states: of all groups; they have one policy, one `burst`, and at most one step in flight.

    Returns:
        For each group its turns, all in the same bucket; None for a group that runs a batch of padding. None for all when there
        is nothing to do before the outcome of what is in flight is known or, when nothing is, exactly when no request is live.
    """
    ready = [state.ready for state in states]
    steps: list[Step | None] = [None] * len(states)
    if not any(ready) or states[0].burst < states[0].policy.prefill_burst:
        steps = [_plan_prefill(state) for state in states]
    if not any(steps):
        steps = [_plan_decode(state, able) if able else None for state, able in zip(states, ready, strict=True)]
        if any(able and step is None for able, step in zip(ready, steps, strict=True)):
            return None
    wanted = [step.bucket for step in steps if step is not None]
    if not wanted:
        return None
    # A group's turns fit any larger bucket as they are: in its own one, its rows and its tokens are all there are.
    bucket = max(wanted, key=lambda b: (b.q_len, b.batch))
    return tuple(step and replace(step, bucket=bucket) for step in steps)


def least_loaded(states: Sequence[State]) -> int:
    """Which group a new request goes to: that with the fewest live requests; among those, the fewest pages in use."""
    return min(range(len(states)), key=lambda i: (len(states[i].running) + len(states[i].waiting), states[i].used_pages, i))


def _plan_prefill(state: State) -> Step | None:
    policy = state.policy
    if state.running and not state.running[-1].decoding:
        live, admitted = state.running[-1], None
    elif state.waiting and state.free_slots >= policy.limits.slots_per_request:
        first = state.waiting[0]
        pages = policy.pages_to_prefill(first)
        if pages + len(state.running) * policy.pages_for(policy.candidates) > state.free_pages:
            return None
        live, admitted = first._replace(pages=pages), first.id
    else:
        return None
    bucket = choose_prefill(policy.buckets, live.total - live.computed)
    tokens = live.known(live.computed, bucket.q_len)
    (following,) = live.known(live.computed + len(tokens), 1) or (-1,)
    turn = Turn(live.request, live.arrival, live.pages, live.computed, len(live.generated), tokens, following)
    return Step(bucket, (turn,), admitted=admitted)


def _plan_decode(state: State, ready: Sequence[Live]) -> Step | None:
    """A step of those served longest ago; None where something would have to be preempted while anything is in flight."""
    policy = state.policy
    running, free = list(state.running), state.free_pages
    preempted: list[str] = []
    while True:
        ready = sorted(ready, key=lambda live: live.served)
        bucket = choose(policy.buckets, len(ready))
        chosen = ready[: bucket.batch]
        pages = [max(live.pages, policy.pages_to_decode(live)) for live in chosen]
        if sum(pages) - sum(live.pages for live in chosen) <= free:
            turns = tuple(_decode_turn(live, count, policy.limits.drafts) for live, count in zip(chosen, pages, strict=True))
            return Step(bucket, turns, tuple(preempted))
        if state.in_flight:
            return None
        # The one being prefilled, if any, is the youngest, so an older one that decodes is always left.
        victim = running.pop()
        preempted.append(victim.id)
        free += victim.pages
        ready = [live for live in ready if live.arrival != victim.arrival]


def _decode_turn(live: Live, pages: int, drafts: int) -> Turn:
    start = live.computed + live.in_flight
    most = live.request.speculative_tokens
    verified = drafts if most is None else min(most, drafts)
    return Turn(live.request, live.arrival, pages, start, start + 1 - len(live.request.prompt), drafts=verified)
