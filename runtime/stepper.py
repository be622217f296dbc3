"""Schedules requests, runs their steps on an executor, and sends their events.

Where the executor allows it, the next step is launched before the results of the one before it are read, so that the device never
waits for this loop. Results for a request that has ended meanwhile are dropped.
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..graphs.errors import RequestError, SpecError
from ..graphs.types import Bucket
from . import delivery, step_outputs
from .adjustments import Adjuster
from .bitmasks import bitmasks
from .constraint import ConstraintError
from .delivery import Live, Sink
from .executor import Executor, ExecutorError, Pending
from .idle_memory import IdleMemory
from .journal import Journal, NoJournal
from .mask_filling import MaskFilling
from .metrics import Metrics
from .prefix_cache import Flush, PrefixCacheSettings
from .refresh import Refresher
from .request import Event, ExecutionRecord, FinishEvent, Request
from .scheduler import admission, advance
from .scheduler.kv_cache_manager import KVCacheManager, PrefixCaching
from .scheduler.policy import Policy
from .scheduler.request_state import RequestState
from .scheduler.schedule import schedule, wanted_bucket
from .scheduler.scheduled_step import ScheduledStep
from .scheduler.state import GroupState, SchedulerState

log = logging.getLogger(__name__)


class Stepper:
    """What is done in a step, by whoever calls `step`. `submit`, `cancel` and `stats` may be called from any thread.

    Sinks are called from the thread that steps, never with a lock held; a `BatchSink` once for all its events of a step. A sink that
    raises loses its request.

    Attributes:
        journal: is told every input and decision; to be set before the first request.
        masks: fills the bitmasks of constrained requests; a replay sets it.
        now_ms: what time it is for requests; a replay sets it.
        took_ms: how long a step took that was launched and that ended then, both in ms of `now_ms`; a replay sets it.
        on_end: called with the FinishEvent of every request, after its sink, by the thread that ends it.

    Args:
        executor: runs the steps; only the stepping thread calls it, except for `compiles` and `backends`.
        clock: monotonic seconds.
        prefill_burst, measured, itl_target_ms: see `Policy`.
        refresh_every_s: shortest time between two calls of `executor.refresh`; None never calls it, nor gives memory back (`IdleMemory`).
        run_ahead: how many steps are launched before the results of the one before them are read: 0 or 1; None is as many as the
            executor allows.
        on_failure: called once, by the stepping thread, when no step can run any more.
        prefix_cache: how prefixes of requests are kept for later ones; None keeps none.
        fixed_tokens: see `Policy`; None takes the executor's.

    Raises:
        SpecError: when the executor's limits or buckets cannot serve every legal request, or run_ahead is more than it allows.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        clock: Callable[[], float] = time.monotonic,
        prefill_burst: int = 1,
        measured: bool = False,
        itl_target_ms: float | None = None,
        refresh_every_s: float | None = 1.0,
        run_ahead: int | None = None,
        on_failure: Callable[[], None] = lambda: None,
        prefix_cache: PrefixCacheSettings | None = None,
        fixed_tokens: float | None = None,
    ) -> None:
        limits, allowed = executor.limits, executor.run_ahead
        self.run_ahead = allowed if run_ahead is None else run_ahead
        if not 0 <= self.run_ahead <= min(allowed, 1):
            raise SpecError(f"run_ahead is {self.run_ahead}; legal is 0 to {min(allowed, 1)}, the executor allows {allowed}")
        self.executor, self._on_failure = executor, on_failure
        self.now_ms: Callable[[], float] = lambda: clock() * 1e3
        self.failure: str | None = None
        self.on_end: Callable[[FinishEvent], None] = lambda _: None
        self.journal: Journal = NoJournal()
        measured = measured or itl_target_ms is not None
        fixed_tokens = executor.fixed_tokens if fixed_tokens is None else fixed_tokens
        policy = Policy(limits, executor.buckets, prefill_burst, measured, itl_target_ms, fixed_tokens)
        self.prefix_cache = prefix_cache
        caching = PrefixCaching(executor.recurrent, prefix_cache.most_tokens) if prefix_cache else None
        self._cache_managers = tuple(KVCacheManager(limits, executor.max_logprobs, caching) for _ in range(executor.groups))
        self._state = SchedulerState(policy, tuple(GroupState(prefixes=manager.prefixes) for manager in self._cache_managers))
        self._adjuster, self.masks = Adjuster(executor.vocab_size), MaskFilling(limits.bitmask_words)
        # Each with the missing bucket that it would have run in, if any, and when it was launched.
        self._in_flight: deque[tuple[ScheduledStep, Bucket | None, float, Pending]] = deque()
        self._last_result_ms, self._metrics = 0.0, Metrics(limits.drafts, limits.max_model_len)
        self.took_ms: Callable[[float, float], float] = self._took_ms
        self._refresher = Refresher(executor, refresh_every_s, clock)
        self._idle_memory = IdleMemory(executor, self._cache_managers, clock, never=refresh_every_s is None)
        self._arrivals = itertools.count()
        # New requests, arrivals of requests to cancel, and orders to flush.
        self._inbox: deque[RequestState | int | Flush] = deque()
        self._live: dict[str, Live] = {}
        self._busy_since_s: float | None = None
        # Guards the inbox, the live requests, the metrics, the flags, and the binding of the (frozen) state.
        self._wake = threading.Condition()
        self._refusal: str | None = None
        self._held_back = False
        self._checked, self._used_pages = True, 0

    def submit(self, request: Request, sink: Sink) -> None:
        """Queues a request; its events go to `sink`, a FinishEvent last. A seed of None is drawn here.

        Raises:
            RequestError: when the request can never be served, its id is live, or the engine is stopping.
        """
        limits = self.executor.limits
        admission.check(request, limits, self.executor.vocab_size, self.executor.max_logprobs, self.executor.max_ranked)
        if request.sampling.seed is None:
            request = replace(request, sampling=replace(request.sampling, seed=secrets.randbits(64)))
        with self._wake:
            if self._refusal is not None:
                raise RequestError(f"the engine takes no new requests: {self._refusal}", code="engine_stopped")
            if request.id in self._live:
                raise RequestError(f"id {request.id!r} is the id of a live request; legal is one that is not", param="id")
            arrival = next(self._arrivals)
            self._live[request.id] = Live(sink, arrival)
            record = ExecutionRecord(accepted_per_position=(0,) * limits.drafts)
            self._inbox.append(RequestState(request, arrival, self.now_ms(), record, unscored=request.num_scored))
            if not self._held_back:
                self._wake.notify_all()

    def hold(self) -> None:
        """Requests that are submitted until `release` do not wake an engine that has nothing to do, so that they begin together: the first
        one alone would run steps of one row, and the others wait for them."""
        self._held_back = True

    def release(self) -> None:
        """See `hold`."""
        with self._wake:
            self._held_back = False
            self._wake.notify_all()

    def cancel(self, *request_ids: str) -> bool:
        """Ends requests before the next step is scheduled; returns whether any was live.

        Their FinishEvents have the reason "cancelled", or another one if they ended before the cancel was handled.
        """
        with self._wake:
            arrivals = [self._live[name].arrival for name in request_ids if name in self._live]
            self._inbox.extend(arrivals)
            self._wake.notify_all()
        return bool(arrivals)

    def flush_prefix_cache(self) -> bool:
        """Forgets all prefixes before the next step, also those that requests compute meanwhile; returns whether any are kept."""
        with self._wake:
            self._inbox.append(Flush())
            self._wake.notify_all()
        return self.prefix_cache is not None

    def step(self) -> bool:
        """Handles the inbox, launches at most one step, and reads the results of steps until at most `run_ahead` are in flight.

        Returns:
            Whether there was anything to do.
        """
        self._busy_since_s = time.monotonic()
        try:
            return self._step()
        finally:
            self._busy_since_s = None

    def _step(self) -> bool:
        received = self._receive()
        if self._state.next_deadline_ms < math.inf:
            self._expire()
        self._refresher.when_due()
        self._idle_memory.when_due(busy=bool(self._in_flight))
        # An equal state, so that no other thread minds.
        self._state = self.masks.hold(self._state)
        self.journal.held(sorted(self._state.unready))
        step = schedule(self._state)
        if step is not None:
            self._checked = False
            self._launch(step)
        elif self._in_flight:
            # What comes next depends on the results of the steps in flight.
            self._finish_oldest()
        elif self._state.unready:
            self.masks.wait()
        else:
            if not self._checked:
                self.check()
                self._checked = True
            return received
        while len(self._in_flight) > self.run_ahead:
            self._finish_oldest()
        return True

    def stats(self) -> dict[str, Any]:
        """Gauges and counters, consistent with each other; `kv_cache_usage_perc` is from 0 to 1."""
        with self._wake:
            groups, live, used, counters = self._state.groups, len(self._live), self._used_pages, self._metrics.snapshot()
        running = sum(len(group.running) for group in groups)
        return {
            "num_requests_running": running,
            "num_requests_waiting": live - running,
            "kv_cache_usage_perc": used / (len(groups) * (self.executor.limits.num_pages - 1)),
            **counters,
            "compiles_after_ready_total": self.executor.compiles(),
            "backends": dict(self.executor.backends),
        }

    @property
    def policy(self) -> Policy:
        """What decides the steps."""
        return self._state.policy

    @property
    def step_age_s(self) -> float:
        """How long the current call of `step` has taken; 0 between steps."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def check(self) -> None:
        """Compares the pools with the scheduler's running requests. For the stepping thread, between steps.

        Raises:
            OwnershipError: on a leak, a double owner, or a count that differs.
        """
        for manager, group in zip(self._cache_managers, self._state.groups, strict=True):
            manager.check(group)

    def _receive(self) -> bool:
        with self._wake:
            messages = list(self._inbox)
            self._inbox.clear()
        self.journal.received(messages)
        new = [message for message in messages if isinstance(message, RequestState)]
        cancelled = {message for message in messages if isinstance(message, int)}
        for manager in self._cache_managers if any(isinstance(message, Flush) for message in messages) else ():
            manager.flush()
        if new:
            self._publish(advance.submit(self._state, *new), ())
        if cancelled:
            self._publish(*advance.cancel(self._state, cancelled, self.now_ms()))
        return bool(messages)

    def _expire(self) -> None:
        """Ends the requests whose deadlines have passed."""
        now_ms = self.now_ms()
        state, events = advance.expire(self._state, now_ms)
        if events:
            self.journal.expired(now_ms, [event.request_id for event in events])
        if state is not self._state:
            self._publish(state, events)

    def _launch(self, step: ScheduledStep) -> None:
        """Launches a step. If that fails, the steps before it are finished first, so that results are committed in order."""
        missing, now_ms = self.executor.missing, self.now_ms()
        wanted = wanted_bucket(self._state, missing) if missing else None
        try:
            masks = bitmasks(step, self.executor.limits.bitmask_words, self.masks.take)
        except ConstraintError as error:
            # Nothing was launched, so the others are scheduled again without it.
            self.journal.dead_end(error.request_id)
            self._publish(*advance.end(self._state, error.request_id, str(error), now_ms, error.code))
            return
        self.journal.launched(step, masks)
        state = advance.launch(self._state, step, now_ms)
        tables = self._adjuster.adjustments(step)
        parts = zip(self._cache_managers, step.groups, strict=True)
        inputs = [manager.inputs(step.bucket, part, masks, tables) for manager, part in parts]
        with self._wake:
            self._state, self._used_pages = state, state.used_pages
            self._metrics.count_launch(step)
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
        try:
            results = step_outputs.read_outputs(pending.result(), step, self._state, self.executor.vocab_size)
        except ExecutorError:
            raise
        except Exception as error:
            self._fail(step, error)
        else:
            self.journal.finished(step, results)
            now_ms = self.now_ms()
            took_ms = None
            if self.policy.measured:
                took_ms = self.took_ms(launched_ms, now_ms)
                self.journal.took(took_ms)
            if self.prefix_cache is not None:
                for manager, rows in zip(self._cache_managers, advance.computed(self._state, step, results), strict=True):
                    manager.computed(rows)
            state, events = advance.commit(self._state, step, results, now_ms, took_ms)
            self._publish(state, events, lambda: self._metrics.count_results(step, results, wanted, now_ms))

    def _took_ms(self, launched_ms: float, now_ms: float) -> float:
        # A step that was launched while another one ran began when that ended.
        began_ms, self._last_result_ms = max(launched_ms, self._last_result_ms), now_ms
        return now_ms - began_ms

    def _fail(self, step: ScheduledStep, error: Exception) -> None:
        name = step.bucket.name
        log.error("a step of %s failed", name, exc_info=error)
        self.journal.failed(step, f"{type(error).__name__}: {error}")
        state, events = advance.fail(self._state, step, f"{name}: {type(error).__name__}: {error}", self.now_ms())
        self._publish(state, events, self._metrics.count_failure)

    def _publish(
        self,
        state: SchedulerState,
        events: Sequence[Event],
        count: Callable[[], None] = lambda: None,
    ) -> None:
        """Makes a new state the current one, calls `count` under the lock, and then sends the events to the sinks."""
        finished = [event.request_id for event in events if isinstance(event, FinishEvent)]
        if finished:
            events = [self._with_writes(event) if isinstance(event, FinishEvent) else event for event in events]
        for request_id in finished:
            # Only its own group's pools hold anything of it.
            for manager in self._cache_managers:
                manager.release(request_id)
            self._adjuster.forget(request_id)
            self.masks.forget(request_id)
        with self._wake:
            self._state, self._used_pages = state, state.used_pages
            count()
            # There are none after `give_up`, which ended all requests.
            deliveries = [(self._live[event.request_id].sink, event) for event in events if event.request_id in self._live]
            self._metrics.count_events([event for _, event in deliveries])
            for request_id in finished:
                self._live.pop(request_id, None)
        self._send(deliveries)

    def _with_writes(self, end: FinishEvent) -> FinishEvent:
        kept = sum(manager.num_kept(end.request_id) for manager in self._cache_managers)
        return replace(end, record=end.record._replace(cache_write_tokens=kept)) if kept else end

    def _cancel_lost(self, lost: Sequence[Event]) -> None:
        if lost:
            self.cancel(*{event.request_id for event in lost})

    def _send(self, deliveries: Sequence[tuple[Sink, Event]]) -> None:
        self._cancel_lost(delivery.send(deliveries))
        for _, event in deliveries:
            if isinstance(event, FinishEvent):
                self.on_end(event)
