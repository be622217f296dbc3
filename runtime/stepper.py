"""Schedules requests and runs their steps on an executor, on one thread.

Where the executor allows it, the next step is launched before the results of the one before it are read, so that the device never
waits for this loop. Results for a request that has ended meanwhile are dropped.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from ..graphs.errors import SpecError
from ..graphs.steps.table import kind_of
from ..graphs.types import Bucket
from . import step_outputs
from .adjustments import Adjuster
from .bitmasks import bitmasks
from .constraint import ConstraintError
from .executor import Executor, ExecutorError, Numbers, Pending
from .idle_memory import IdleMemory
from .journal import Journal, NoJournal
from .mask_filling import MaskFilling
from .metrics import Metrics
from .picture_spans import position_offset
from .refresh import Refresher
from .request import Event, FinishEvent, Flush, Landed, ParkedEvent
from .scheduler import advance
from .scheduler.advance import GroupResults
from .scheduler.kv_cache_manager import KVCacheManager, PrefixCacheSettings
from .scheduler.picture_numbers import PictureNumbers
from .scheduler.policy import Policy
from .scheduler.request_state import RequestState
from .scheduler.schedule import reservations, schedule, wanted_bucket
from .scheduler.scheduled_step import ScheduledStep
from .scheduler.state import GroupState, SchedulerState

log = logging.getLogger(__name__)

Message = RequestState | int | Flush | Landed
"""A new request, the arrival of one to cancel, an order to flush, or a request whose pages a handover has filled, or will not fill."""

Count = Callable[[Metrics], None]
"""Counts what led to a state."""

Publish = Callable[[SchedulerState, Sequence[Event], Count], None]
"""Told each new state, the events for clients, and what is to be counted with it."""


class Stepper:
    """What is done in a step, by the one thread that calls it.

    Attributes:
        state: of the scheduler.
        cache_managers: own the pages and slots, by dp group.
        journal: is told every input and decision; to be set before the first request.
        masks: fills the bitmasks of constrained requests; a replay sets it.
        now_ms: what time it is for requests; a replay sets it.
        on_parked: told when a request of a handover has its pages, or has computed them; by any thread.
        took_ms: how long a step took that was launched and that ended then, both in ms of `now_ms`; a replay sets it.

    Args:
        executor: runs the steps.
        publish: called whenever the state changes.
        clock: monotonic seconds.
        prefill_burst, measured, itl_target_ms: see `Policy`.
        refresh_every_s: shortest time between two calls of `executor.refresh`; None never calls it, nor gives memory back (`IdleMemory`).
        run_ahead: how many steps are launched before the results of the one before them are read: 0 or 1; None is as many as the
            executor allows.
        prefix_cache: how prefixes of requests are kept for later ones; None keeps none.
        fixed_tokens: see `Policy`; None takes the executor's.

    Raises:
        SpecError: when the executor's limits or buckets cannot serve every legal request, or run_ahead is more than it allows.
    """

    def __init__(
        self,
        executor: Executor,
        publish: Publish,
        *,
        clock: Callable[[], float] = time.monotonic,
        prefill_burst: int = 1,
        measured: bool = False,
        itl_target_ms: float | None = None,
        refresh_every_s: float | None = 1.0,
        run_ahead: int | None = None,
        prefix_cache: PrefixCacheSettings | None = None,
        fixed_tokens: float | None = None,
    ) -> None:
        limits, allowed = executor.limits, executor.run_ahead
        self.run_ahead = allowed if run_ahead is None else run_ahead
        if not 0 <= self.run_ahead <= min(allowed, 1):
            raise SpecError(f"run_ahead is {self.run_ahead}; legal is 0 to {min(allowed, 1)}, the executor allows {allowed}")
        self.executor, self._publish, self.refresh_every_s = executor, publish, refresh_every_s
        self.now_ms: Callable[[], float] = lambda: clock() * 1e3
        self.journal: Journal = NoJournal()
        measured = measured or itl_target_ms is not None
        fixed_tokens = executor.fixed_tokens if fixed_tokens is None else fixed_tokens
        policy = Policy(limits, executor.buckets, prefill_burst, measured, itl_target_ms, fixed_tokens, any_size=executor.any_size)
        self.prefix_cache = prefix_cache
        self.cache_managers = tuple(
            KVCacheManager(limits, executor.max_logprobs, prefix_cache, recurrent=executor.recurrent, segments=executor.segments)
            for _ in range(executor.groups)
        )
        groups = tuple(GroupState(prefixes=manager.prefixes, pictures=manager.pictures) for manager in self.cache_managers)
        self.state = SchedulerState(policy, groups)
        self._numbers = PictureNumbers(executor.vocab_size)
        self.on_parked: Callable[[ParkedEvent], None] = lambda _: None
        self._adjuster, self.masks = Adjuster(executor.vocab_size), MaskFilling(limits.bitmask_words)
        # Each with the missing bucket that it would have run in, if any, and when it was launched.
        self._in_flight: deque[tuple[ScheduledStep, Bucket | None, float, Pending]] = deque()
        # Requests that are to be received, and how many steps must have ended until peers may write their pages.
        self._reserved: deque[tuple[int, Collection[int]]] = deque()
        self._num_ended = 0
        self._last_result_ms = 0.0
        self.took_ms: Callable[[float, float], float] = self._took_ms
        self._refresher = Refresher(executor, refresh_every_s, clock)
        self._idle_memory = IdleMemory(executor, self.cache_managers, clock, never=refresh_every_s is None)
        self._checked = True

    def step(self, messages: Sequence[Message]) -> bool:
        """Handles messages, launches at most one step, and reads the results of steps until at most `run_ahead` are in flight.

        Returns:
            Whether there was anything to do.
        """
        self.receive(messages)
        if self.state.next_deadline_ms < math.inf:
            self._expire()
        self._refresher.when_due()
        self._idle_memory.when_due(busy=bool(self._in_flight))
        # An equal state, so that no other thread minds.
        reserved = self._reserve()
        self.state = self.masks.hold(self.state)
        self.journal.held(sorted(self.state.unready))
        step = schedule(self.state)
        if step is not None:
            self._checked = False
            self._launch(step)
        elif self._in_flight:
            # What comes next depends on the results of the steps in flight.
            self._finish_oldest()
        elif self.state.unready:
            self.masks.wait()
        else:
            if not self._checked:
                self.check()
                self._checked = True
            return bool(messages) or reserved
        while len(self._in_flight) > self.run_ahead:
            self._finish_oldest()
        return True

    @property
    def policy(self) -> Policy:
        """What decides the steps."""
        return self.state.policy

    def check(self) -> None:
        """Compares the pools with the scheduler's running requests. For the stepping thread, between steps.

        Raises:
            OwnershipError: on a leak, a double owner, or a count that differs.
        """
        for manager, group in zip(self.cache_managers, self.state.groups, strict=True):
            manager.check(group)

    def receive(self, messages: Sequence[Message]) -> None:
        """Handles messages without a step."""
        self.journal.received(messages)
        new = [self._numbered(message) for message in messages if isinstance(message, RequestState)]
        cancelled = {message for message in messages if isinstance(message, int)}
        landed, unfilled = ({m.arrival for m in messages if isinstance(m, Landed) and m.filled is filled} for filled in (True, False))
        for manager in self.cache_managers if any(isinstance(message, Flush) for message in messages) else ():
            manager.flush()
        if new:
            self._advance(advance.submit(self.state, *new), ())
        if cancelled:
            self._advance(*advance.cancel(self.state, cancelled, self.now_ms()))
        if landed:
            self._land(landed)
        if unfilled:
            for state, manager in zip(self.state.groups, self.cache_managers, strict=True):
                for request in state.running:
                    if request.parked and request.arrival in unfilled:
                        manager.release(request.id)
            self._advance(advance.unparked(self.state, unfilled), ())

    def _numbered(self, request: RequestState) -> RequestState:
        pictures = request.request.pictures
        return request._replace(picture_numbers=self._numbers.of(pictures)) if pictures else request

    def _land(self, arrivals: Collection[int]) -> None:
        """Has requests begin with the last token of their prompts, behind what handovers have put into their pages."""
        for group, (state, manager) in enumerate(zip(self.state.groups, self.cache_managers, strict=True)):
            for request in state.running:
                if request.parked and request.arrival in arrivals:
                    (token,) = request.token_ids(request.num_tokens - 1, 1)
                    slots = manager.request_slot(request.id), manager.state_slot(request.id)
                    self.executor.landed(group, _received(manager.parked(request, group)))
                    offset = position_offset(picture.span for picture in request.request.pictures)
                    self.executor.start_decoding(group, *slots, request.num_tokens - 1, token, offset)
        self._advance(advance.landed(self.state, arrivals, self.now_ms()), ())

    def _reserve(self) -> bool:
        """Gives waiting requests that are to be received their pages; returns whether there were any."""
        reserved = [reservations(self.policy, group) for group in self.state.groups]
        if not any(reserved):
            return False
        for manager, own in zip(self.cache_managers, reserved, strict=True):
            manager.reserve(own)
        self._advance(advance.reserve(self.state, reserved), ())
        # Requests that have ended may have had these pages, and be written to by a step in flight.
        self._reserved.append((self._num_ended + len(self._in_flight), {item.state.arrival for own in reserved for item in own}))
        self._receive()
        return True

    def _receive(self) -> None:
        """Has peers write the pages of reserved requests that no step in flight can use."""
        while self._reserved and self._reserved[0][0] <= self._num_ended:
            _, arrivals = self._reserved.popleft()
            for event in self._parked(arrivals):
                self.executor.receive(event.group, _received(event), functools.partial(self.on_parked, event))

    def fail_all(self, message: str) -> None:
        """Ends all requests with an error."""
        self._advance(*advance.fail_all(self.state, message, self.now_ms()))

    def _expire(self) -> None:
        """Ends the requests whose deadlines have passed."""
        now_ms = self.now_ms()
        state, events = advance.expire(self.state, now_ms)
        if events:
            self.journal.expired(now_ms, [event.request_id for event in events])
        if state is not self.state:
            self._advance(state, events)

    def _launch(self, step: ScheduledStep) -> None:
        """Launches a step. If that fails, the steps before it are finished first, so that results are committed in order."""
        missing, now_ms = self.executor.missing, self.now_ms()
        wanted = wanted_bucket(self.state, missing) if missing else None
        try:
            masks = bitmasks(step, self.executor.limits.bitmask_words, self.masks.take)
        except ConstraintError as error:
            # Nothing was launched, so the others are scheduled again without it.
            self.journal.dead_end(error.request_id)
            self._advance(*advance.end(self.state, error.request_id, str(error), now_ms, error.code))
            return
        self.journal.launched(step, masks)
        state = advance.launch(self.state, step, now_ms)
        tables = self._adjuster.adjustments(step)
        parts = zip(self.cache_managers, step.groups, strict=True)
        inputs = [manager.inputs(step.shape, part, masks, tables) for manager, part in parts]
        self._advance(state, (), lambda metrics: metrics.count_launch(step))
        try:
            self._in_flight.append((step, wanted, now_ms, self.executor.launch(step.bucket, inputs)))
        except ExecutorError:
            raise
        except Exception as error:
            while self._in_flight:
                self._finish_oldest()
            self._fail(step, error)

    def _finish_oldest(self) -> None:
        """Waits for the oldest step in flight, commits its results and sends the events."""
        step, wanted, launched_ms, pending = self._in_flight.popleft()
        self._num_ended += 1
        try:
            outputs = pending.result()
            finite = () if kind_of(step.bucket).samples else step_outputs.read_finite(outputs, step)
            results = () if finite else step_outputs.read_outputs(outputs, step, self.state, self.executor.vocab_size)
            experts = step_outputs.count_experts(outputs, step, self._num_ended % len(outputs))
        except ExecutorError:
            raise
        except Exception as error:
            self._fail(step, error)
        else:
            self._commit(step, results, finite, launched_ms, wanted)
            if experts is not None:
                self._advance(self.state, (), lambda metrics: metrics.count_experts(experts))
        self._receive()

    def _commit(
        self,
        step: ScheduledStep,
        results: Sequence[GroupResults],
        finite: Sequence[Sequence[bool]],
        launched_ms: float,
        wanted: Bucket | None,
    ) -> None:
        """Commits what a step has sampled, or ends the requests whose pictures came out as no numbers, and sends the events."""
        self.journal.finished(step, results, finite)
        now_ms = self.now_ms()
        took_ms = self._measured(launched_ms, now_ms)
        if finite:
            state, events = advance.encoded(self.state, step, self._lost(step, finite), now_ms, took_ms)
            self._advance(state, events, lambda metrics: metrics.count_encoded(step, len(events), wanted, now_ms - launched_ms))
            return
        if self.prefix_cache is not None:
            for manager, rows in zip(self.cache_managers, advance.computed(self.state, step, results), strict=True):
                manager.computed(rows)
        state, events = advance.commit(self.state, step, results, now_ms, took_ms)
        self._advance(state, events, lambda metrics: metrics.count_results(step, results, wanted, now_ms))
        # A prompt is parked when its last chunk is launched, and the one before it ends while that is in flight.
        if handed_over := _handed_over(step):
            running = set().union(*(_handed_over(later) for later, *_ in self._in_flight))
            for event in self._parked(handed_over - running):
                self.on_parked(event)

    def _lost(self, step: ScheduledStep, finite: Sequence[Sequence[bool]]) -> dict[str, str]:
        """Why requests end of which a picture of an encode step came out as no numbers, by id."""
        parts = zip(self.cache_managers, step.groups, finite, strict=True)
        return {owner: why for manager, part, own in parts for owner, why in manager.encoded(part, own).items()}

    def _measured(self, launched_ms: float, now_ms: float) -> float | None:
        """How long a step took that has ended now, where the policy goes by that."""
        if not self.policy.measured:
            return None
        took_ms = self.took_ms(launched_ms, now_ms)
        self.journal.took(took_ms)
        return took_ms

    def _took_ms(self, launched_ms: float, now_ms: float) -> float:
        # A step that was launched while another one ran began when that ended.
        began_ms, self._last_result_ms = max(launched_ms, self._last_result_ms), now_ms
        return now_ms - began_ms

    def _fail(self, step: ScheduledStep, error: Exception) -> None:
        name = step.bucket.name
        log.error("a step of %s failed", name, exc_info=error)
        self.journal.failed(step, f"{type(error).__name__}: {error}")
        message = f"{name}: {type(error).__name__}: {error}"
        if not kind_of(step.bucket).samples:
            lost = self._lost(step, [[False] * len(part.segments) for part in step.groups])
            state, events = advance.encoded(self.state, step, dict.fromkeys(lost, message), self.now_ms())
        else:
            state, events = advance.fail(self.state, step, message, self.now_ms())
        self._advance(state, events, Metrics.count_failure)

    def _advance(self, state: SchedulerState, events: Sequence[Event], count: Count = lambda _: None) -> None:
        """Makes a new state the current one, frees what requests that ended held, and publishes it."""
        if ended := [event.request_id for event in events if isinstance(event, FinishEvent)]:
            events = [self._with_writes(event) if isinstance(event, FinishEvent) else event for event in events]
            for request_id in ended:
                # Only its own group's pools hold anything of it.
                for manager in self.cache_managers:
                    manager.release(request_id)
                self._adjuster.forget(request_id)
                self.masks.forget(request_id)
        self.state = state
        self._publish(state, events, count)

    def _parked(self, arrivals: Collection[int]) -> list[ParkedEvent]:
        """Where those of these requests that are parked have their pages."""
        groups = enumerate(zip(self.state.groups, self.cache_managers, strict=True))
        return [
            manager.parked(request, number)
            for number, (group, manager) in groups
            for request in group.running
            if request.parked and request.arrival in arrivals
        ]

    def _with_writes(self, end: FinishEvent) -> FinishEvent:
        written = sum(manager.num_kept(end.request_id) for manager in self.cache_managers)
        return replace(end, record=end.record._replace(cache_write_tokens=written)) if written else end


def _handed_over(step: ScheduledStep) -> set[int]:
    """Arrivals of the requests of handovers that a step runs."""
    return {row.state.arrival for part in step.groups for row in part.rows if row.state.request.handover}


def _received(event: ParkedEvent) -> Numbers:
    """What peers write of a request: nothing where its prompt is one token."""
    return {"pages": event.pages[event.known :], "slots": (event.slot,) if event.pages else ()}
