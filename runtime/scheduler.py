"""Turns the requests at hand into the next step.

Everything here is a pure function over frozen records: the same state gives the same step. Pages and slots are only
counted; which ones they are is the pools' business (`pages.py`).

Policy:
    Order of arrival is the only priority. Running requests are always older than waiting ones.
    One prompt is prefilled at a time, in chunks; while anything decodes, at most `prefill_burst` chunks run between two
    decode steps, so a stream waits for at most that many chunks between two of its tokens.
    When more requests decode than the largest bucket holds, those served longest ago go first.
    A request is admitted when a group of slots is free, and pages for all its tokens plus one, plus one page for every
    running request: without that reserve a preempted request would be prefilled only to be preempted again.
    A decode step that lacks pages preempts the youngest running request until it has them; that one goes back to the
    front of the queue and later prefills its prompt and what it had generated.

Groups that step together (`plan_together`) each follow this policy over their own requests, pages and slots, but for one thing: when
any of them may prefill, all of them prefill or rest, and `prefill_burst` counts the steps of all.

No deadlock: the oldest running request is never preempted while another runs, and alone it fits (see `Policy`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..graphs.errors import SpecError
from ..graphs.types import Bucket, Limits
from .buckets import choose, choose_prefill, of_kind, padded_rows, write_width
from .live import Live
from .request import Event, Request, TokenEvent


@dataclass(frozen=True)
class Policy:
    """The sizes that decisions depend on.

    Attributes:
        prefill_burst: most prefill steps between two decode steps while any request decodes.

    Raises:
        SpecError: when a request of max_model_len could never be served, a kind of bucket is missing, or a decode bucket
            takes more than one token per request.
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
        if limits.num_slots - 1 < limits.slots_per_request:
            raise SpecError(
                f"{limits.num_slots} state slots leave {limits.num_slots - 1} beside the null slot; one request takes "
                f"{limits.slots_per_request}, so legal is at least {limits.slots_per_request + 1}"
            )
        of_kind(self.buckets, "prefill")
        for bucket in of_kind(self.buckets, "decode"):
            if bucket.q_len != 1:
                raise SpecError(f"bucket {bucket.name} decodes {bucket.q_len} tokens per request; this engine decodes 1, without drafts")

    def pages_for(self, tokens: int) -> int:
        """Pages that hold this many tokens of one request."""
        return -(-tokens // self.limits.page_size)


@dataclass(frozen=True, slots=True)
class State:
    """All live requests, oldest first in both lists.

    Attributes:
        arrivals: requests ever submitted.
        turns: turns ever given (see `Live.served`).
        burst: prefill steps since the last decode step.
    """

    policy: Policy
    waiting: tuple[Live, ...] = ()
    running: tuple[Live, ...] = ()
    arrivals: int = 0
    turns: int = 0
    burst: int = 0

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


class Turn(NamedTuple):
    """One request's row of a step.

    Attributes:
        tokens: new tokens to feed.
        start: position of the first of them.
        pages: pages the request holds during the step; grown to this count before it.
        read_index: slot of its group to start from.
        write_indices: slots of its group to write to.
        sample_index: place, among the request's generated tokens, of the first one this row samples.
        samples: whether what is sampled counts; false for a prefill chunk that is not the last.
    """

    request: Request
    tokens: tuple[int, ...]
    start: int
    pages: int
    read_index: int
    write_indices: tuple[int, ...]
    sample_index: int
    samples: bool


@dataclass(frozen=True, slots=True)
class Step:
    """What to do next: free what `preempted` hold, give `admitted` its slots, grow the turns' pages, run the bucket."""

    bucket: Bucket
    turns: tuple[Turn, ...]
    preempted: tuple[str, ...] = ()
    admitted: str | None = None


def submit(state: State, request: Request, submitted_ms: float) -> State:
    """The state with one more request at the end of the queue."""
    live = Live(request, state.arrivals, submitted_ms)
    return replace(state, waiting=(*state.waiting, live), arrivals=state.arrivals + 1)


def cancel(state: State, request_id: str, now_ms: float) -> tuple[State, tuple[Event, ...]]:
    """The state without a request, wherever it was; unchanged when it is not live."""
    return _drop(state, {request_id}, "cancelled", now_ms)


def plan(state: State) -> Step | None:
    """The next step of a group by itself; None exactly when no request is live."""
    (step,) = plan_together((state,)) or (None,)
    return step


def plan_together(states: Sequence[State]) -> tuple[Step | None, ...] | None:
    """The next step of groups that run every step together, in one bucket; None exactly when no request is live in any.

    Args:
        states: of all groups; they have one policy and one `burst`.

    Returns:
        For each group its turns, all in the same bucket; None for a group that runs a batch of padding.
    """
    decoding = [any(live.decoding for live in state.running) for state in states]
    steps: list[Step | None] = [None] * len(states)
    if not any(decoding) or states[0].burst < states[0].policy.prefill_burst:
        steps = [_plan_prefill(state) for state in states]
    if not any(steps):
        steps = [_plan_decode(state) if some else None for state, some in zip(states, decoding, strict=True)]
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
        pages = policy.pages_for(first.total + 1)
        if pages + len(state.running) > state.free_pages:
            return None
        live, admitted = first._replace(pages=pages), first.id
    else:
        return None
    bucket = choose_prefill(policy.buckets, live.total - live.computed)
    return Step(bucket, (_turn(live, bucket, live.pages),), admitted=admitted)


def _plan_decode(state: State) -> Step:
    policy = state.policy
    running, free = list(state.running), state.free_pages
    preempted: list[str] = []
    while True:
        ready = sorted((live for live in running if live.decoding), key=lambda live: live.served)
        bucket = choose(policy.buckets, len(ready))
        chosen = ready[: bucket.batch]
        pages = [max(live.pages, policy.pages_for(live.computed + bucket.q_len)) for live in chosen]
        if sum(pages) - sum(live.pages for live in chosen) <= free:
            turns = tuple(_turn(live, bucket, count) for live, count in zip(chosen, pages, strict=True))
            return Step(bucket, turns, tuple(preempted))
        # The one being prefilled, if any, is the youngest, so an older one that decodes is always left.
        victim = running.pop()
        preempted.append(victim.id)
        free += victim.pages


def _turn(live: Live, bucket: Bucket, pages: int) -> Turn:
    tokens = live.known(live.computed, bucket.q_len)
    return Turn(
        request=live.request,
        tokens=tokens,
        start=live.computed,
        pages=pages,
        read_index=live.state_index,
        write_indices=tuple(range(write_width(bucket))),
        sample_index=len(live.generated),
        samples=live.computed + len(tokens) == live.total,
    )


def _begin(state: State, step: Step) -> State:
    """The state in which a step runs: its preemption, admission and growth done."""
    waiting, running = state.waiting, state.running
    if step.preempted:
        kept = len(running) - len(step.preempted)
        waiting = (*(live.preempted() for live in running[kept:]), *waiting)
        running = running[:kept]
    if step.admitted is not None:
        waiting, running = waiting[1:], (*running, waiting[0])
    pages = {turn.request.id: turn.pages for turn in step.turns}
    running = tuple(live._replace(pages=pages[live.id]) if pages.get(live.id, live.pages) != live.pages else live for live in running)
    return replace(state, waiting=waiting, running=running)


def commit(
    state: State, step: Step, tokens: Sequence[Sequence[int]], *, started_ms: float, now_ms: float
) -> tuple[State, tuple[Event, ...]]:
    """The state after a step that ran, and what the clients are to hear.

    Args:
        state: the one the step was planned from.
        tokens: for each turn, the tokens it sampled (at least one; ignored where the turn does not sample).
        started_ms: when the step began.
        now_ms: when it ended.
    """
    state = _begin(state, step)
    rank = {turn.request.id: i for i, turn in enumerate(step.turns)}
    name, padding, decode = step.bucket.name, padded_rows(step.bucket, len(step.turns)), step.bucket.kind == "decode"
    running: list[Live] = []
    events: list[Event] = []
    for live in state.running:
        place = rank.get(live.id)
        if place is None:
            running.append(live)
            continue
        turn, served = step.turns[place], state.turns + place
        new, reason = live.output(tokens[place], state.policy.limits.max_model_len) if turn.samples else ((), None)
        if decode:
            live = live.decoded(name, new, padding, served)
        else:
            live = live.prefilled(name, len(turn.tokens), new, padding, (started_ms, now_ms), served)
        shown = tuple(new[:-1] if reason == "stop" else new)
        if shown:
            events.append(TokenEvent(live.id, shown))
        if reason is None:
            running.append(live)
        else:
            events.append(live.finished(reason, now_ms))
    burst = 0 if decode else state.burst + 1
    return replace(state, running=tuple(running), turns=state.turns + len(step.turns), burst=burst), tuple(events)


def commit_together(
    states: Sequence[State], steps: Sequence[Step | None], tokens: Sequence[Sequence[Sequence[int]]], *, started_ms: float, now_ms: float
) -> tuple[tuple[State, ...], tuple[Event, ...]]:
    """What `commit` says of every group, after a step of `plan_together`; `tokens` has an item per group, unread where it had no turns."""
    decode = any(step.bucket.kind == "decode" for step in steps if step is not None)
    committed: list[State] = []
    events: list[Event] = []
    for state, step, sampled in zip(states, steps, tokens, strict=True):
        if step is None:
            committed.append(replace(state, burst=0 if decode else state.burst + 1))
            continue
        after, new = commit(state, step, sampled, started_ms=started_ms, now_ms=now_ms)
        committed.append(after)
        events += new
    return tuple(committed), tuple(events)


def fail_together(
    states: Sequence[State], steps: Sequence[Step | None], message: str, now_ms: float
) -> tuple[tuple[State, ...], tuple[Event, ...]]:
    """What `fail` says of every group, after a step of `plan_together` that could not run."""
    failed: list[State] = []
    events: list[Event] = []
    for state, step in zip(states, steps, strict=True):
        after, new = fail(state, step, message, now_ms) if step is not None else (state, ())
        failed.append(after)
        events += new
    return tuple(failed), tuple(events)


def fail(state: State, step: Step, message: str, now_ms: float) -> tuple[State, tuple[Event, ...]]:
    """The state after a step that could not run: its requests end with reason "error", all others go on."""
    return _drop(_begin(state, step), {turn.request.id for turn in step.turns}, "error", now_ms, message)


def fail_all(state: State, message: str, now_ms: float) -> tuple[State, tuple[Event, ...]]:
    """The state with no request left: all end with reason "error"."""
    return _drop(state, {live.id for live in (*state.running, *state.waiting)}, "error", now_ms, message)


def _drop(state: State, ids: set[str], reason: str, now_ms: float, message: str | None = None) -> tuple[State, tuple[Event, ...]]:
    events = tuple(live.finished(reason, now_ms, message) for live in (*state.running, *state.waiting) if live.id in ids)
    keep = {name: tuple(live for live in getattr(state, name) if live.id not in ids) for name in ("running", "waiting")}
    return replace(state, running=keep["running"], waiting=keep["waiting"]), events
