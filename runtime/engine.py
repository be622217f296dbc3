"""Turns submitted requests into streams of events, by running an executor step after step.

Where the executor allows it the next step is launched before the outcome of the one before is read, so that the device never waits for
this loop: what a step says of a request that has ended meanwhile is dropped.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from queue import Queue
from typing import Any, NamedTuple

from ..graphs.errors import RequestError, SpecError
from ..graphs.types import Bucket
from . import step_outputs
from .distributed.control_plane import RankError
from .executor import Executor, Pending
from .metrics import Metrics
from .request import Event, FinishEvent, Request, TokenEvent
from .scheduler import admission, advance, schedule
from .scheduler.kv_cache_manager import Holdings
from .scheduler.schedule import Policy, State, Step

log = logging.getLogger(__name__)

Sink = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class _Submit:
    request: Request
    submitted_ms: float


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: str


class _Flight(NamedTuple):
    """A step that was launched: what each group does in it, and where its outcome will be."""

    bucket: Bucket
    steps: Sequence[Step | None]
    pending: Pending


class Engine:
    """The serving loop. `submit`, `cancel`, `stop` and `stats` may be called from any thread.

    Sinks are called from the thread that steps, never with a lock held. A sink that raises loses its request.

    With several dp groups each has its own requests, pages and slots; all of them run every step together, in one bucket. A new
    request goes to the group with the fewest.

    Args:
        executor: what runs the steps; only the stepping thread calls it, but for `compiles` and `backends`.
        clock: seconds, never going back.
        prefill_burst: most prefill steps between two decode steps while any request decodes.
        refresh_every_s: how often `executor.refresh` is called, at most; None is never.
        run_ahead: how many steps are launched before the outcome of the one before them is read: 0 or 1; None is as many as the
            executor allows.

    Raises:
        SpecError: when the executor's limits or buckets cannot serve every legal request, or run_ahead is more than it allows.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        clock: Callable[[], float] = time.monotonic,
        prefill_burst: int = 1,
        refresh_every_s: float | None = 1.0,
        run_ahead: int | None = None,
    ) -> None:
        limits, allowed = executor.limits, executor.run_ahead
        self._run_ahead = allowed if run_ahead is None else run_ahead
        if not 0 <= self._run_ahead <= min(allowed, 1):
            raise SpecError(f"run_ahead is {self._run_ahead}; legal is 0 to {min(allowed, 1)}, the executor allows {allowed}")
        self._executor, self._max_logprobs = executor, executor.max_logprobs
        self._clock = clock
        groups = range(executor.groups)
        self._states = tuple(State(Policy(limits, executor.buckets, prefill_burst)) for _ in groups)
        self._holdings = tuple(Holdings(limits, self._max_logprobs) for _ in groups)
        self._group_of: dict[str, int] = {}
        self._flights: deque[_Flight] = deque()
        self._metrics = Metrics(limits.drafts)
        self._refresh_every_s = refresh_every_s
        self._refreshed_s = clock()
        self._inbox: deque[_Submit | _Cancel] = deque()
        self._sinks: dict[str, Sink] = {}
        # Guards the inbox, the sinks, the metrics, the flags, and the binding of the (frozen) states.
        self._wake = threading.Condition()
        self._refusal: str | None = None
        self._checked = True
        self._thread: threading.Thread | None = None

    def submit(self, request: Request, sink: Sink) -> None:
        """Queues a request; its events go to `sink`, a FinishEvent last. A seed of None is drawn here.

        Raises:
            RequestError: when the request can never be served, its id is live, or the engine is stopping.
        """
        admission.check(request, self._executor.limits, self._executor.vocab_size, self._max_logprobs)
        if request.sampling.seed is None:
            request = replace(request, sampling=replace(request.sampling, seed=secrets.randbits(64)))
        with self._wake:
            if self._refusal is not None:
                raise RequestError(f"the engine takes no new requests: {self._refusal}", code="engine_stopped")
            if request.id in self._sinks:
                raise RequestError(f"id {request.id!r} is the id of a live request; legal is one that is not", param="id")
            self._sinks[request.id] = sink
            self._inbox.append(_Submit(request, self._now_ms()))
            self._wake.notify_all()

    def cancel(self, request_id: str) -> bool:
        """Ends a request before its next step is planned; returns whether it was live.

        Its FinishEvent says "cancelled", or something else when it ended before the cancel came through.
        """
        with self._wake:
            if request_id not in self._sinks:
                return False
            self._inbox.append(_Cancel(request_id))
            self._wake.notify_all()
            return True

    def step(self) -> bool:
        """Handles what came in, launches at most one step, and reads the outcome of those that are further back than it may run ahead.

        Returns:
            Whether there was anything to do.
        """
        received = self._receive()
        self._refresh_when_due()
        steps = schedule.plan_together(self._states)
        if steps is not None:
            self._checked = False
            self._begin(steps)
        elif self._flights:
            # Only what is in flight can tell what comes next.
            self._take_in()
        else:
            self._check_when_idle()
            return received
        while len(self._flights) > self._run_ahead:
            self._take_in()
        return True

    def run_forever(self) -> None:
        """Steps until `stop`, and then until nothing is live; waits without polling while there is nothing to do.

        A job that lost a rank ends everything like a defect of the engine does, but is not raised: who made the job is told by it.
        """
        try:
            while self._step_or_wait():
                pass
        except RankError as error:
            self._abandon(str(error))
        except BaseException as error:
            self._abandon(f"{type(error).__name__}: {error}")
            raise

    def start(self) -> None:
        """Runs `run_forever` in a thread of its own.

        Raises:
            RuntimeError: when it was started before.
        """
        if self._thread is not None:
            raise RuntimeError("this engine was started before; an engine is started once")
        self._thread = threading.Thread(target=self.run_forever, name="npucompile-engine", daemon=True)
        self._thread.start()

    @staticmethod
    def launch(make: Callable[[], Executor]) -> Engine:
        """Makes an executor and serves it, both on one new thread; returns when it is ready.

        All tensor work belongs on one thread: OpenMP keeps a pool of workers for every thread that ever asked for one, and
        with more pools than cores its workers sleep between operators instead of spinning, which doubles a small step.

        Raises:
            Exception: whatever `make` or the engine's constructor raises.
        """
        made: Queue[Engine | BaseException] = Queue(1)

        def own() -> None:
            try:
                engine = Engine(make())
                engine._thread = threading.current_thread()
            except BaseException as error:
                made.put(error)
                return
            made.put(engine)
            engine.run_forever()

        threading.Thread(target=own, name="npucompile-engine", daemon=True).start()
        found = made.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def stop(self, *, drain: bool = True) -> None:
        """Refuses new requests, finishes (or, without `drain`, cancels) the live ones, and joins the thread if there is one."""
        with self._wake:
            self._refusal = self._refusal or "it is stopping"
            if not drain:
                self._inbox.extend(_Cancel(request_id) for request_id in self._sinks)
            self._wake.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def stats(self) -> dict[str, Any]:
        """Gauges and counters of this moment, consistent with each other; `kv_cache_usage_perc` is from 0 to 1."""
        with self._wake:
            states, live, counters = self._states, len(self._sinks), self._metrics.snapshot()
        running = sum(len(state.running) for state in states)
        return {
            "num_requests_running": running,
            "num_requests_waiting": live - running,
            "kv_cache_usage_perc": sum(state.used_pages for state in states) / sum(s.policy.limits.num_pages - 1 for s in states),
            **counters,
            "compiles_after_ready_total": self._executor.compiles(),
            "backends": dict(self._executor.backends),
        }

    def check(self) -> None:
        """Compares the pools with the live requests, number by number. For the stepping thread, between steps.

        Raises:
            OwnershipError: on a leak, a double owner, or counts other than the scheduler's.
        """
        for holdings, state in zip(self._holdings, self._states, strict=True):
            holdings.check(state)

    def _now_ms(self) -> float:
        return self._clock() * 1e3

    def _receive(self) -> bool:
        with self._wake:
            messages = list(self._inbox)
            self._inbox.clear()
        for message in messages:
            if isinstance(message, _Submit):
                group = self._group_of[message.request.id] = schedule.least_loaded(self._states)
                self._publish(self._with(group, advance.submit(self._states[group], message.request, message.submitted_ms)), ())
            elif (found := self._group_of.get(message.request_id)) is not None:
                state, events = advance.cancel(self._states[found], message.request_id, self._now_ms())
                self._publish(self._with(found, state), events)
        return bool(messages)

    def _with(self, group: int, state: State) -> tuple[State, ...]:
        return (*self._states[:group], state, *self._states[group + 1 :])

    def _refresh_when_due(self) -> None:
        if self._refresh_every_s is None:
            return
        now_s = self._clock()
        if now_s - self._refreshed_s < self._refresh_every_s:
            return
        self._refreshed_s = now_s
        try:
            if self._executor.refresh():
                log.info("new executables were swapped in")
        except RankError:
            raise
        except Exception:
            log.exception("refresh failed; the executables stay as they are")

    def _check_when_idle(self) -> None:
        if not self._checked:
            self.check()
            self._checked = True

    def _begin(self, steps: Sequence[Step | None]) -> None:
        """Launches a step. One that cannot be launched is read at once, after all that were launched before it."""
        states = advance.launch_together(self._states, steps, self._now_ms())
        (bucket,) = {step.bucket for step in steps if step is not None}
        inputs = [holdings.inputs(bucket, step) for holdings, step in zip(self._holdings, steps, strict=True)]
        with self._wake:
            self._states = states
            self._metrics.preemptions += sum(len(step.preempted) for step in steps if step is not None)
        try:
            self._flights.append(_Flight(bucket, steps, self._executor.launch(bucket, inputs)))
        except RankError:
            raise
        except Exception as error:
            while self._flights:
                self._take_in()
            self._fail(bucket, steps, error)

    def _take_in(self) -> None:
        """Waits for the oldest step in flight, and tells what it gave."""
        bucket, steps, pending = self._flights.popleft()
        try:
            outputs = zip(steps, self._states, pending.result(), strict=True)
            results = [
                () if step is None else step_outputs.read(out, step, state, self._executor.vocab_size) for step, state, out in outputs
            ]
        except RankError:
            raise
        except Exception as error:
            self._fail(bucket, steps, error)
        else:
            states, events = advance.commit_together(self._states, steps, results, self._now_ms())
            self._publish(states, events, lambda: self._count_step(bucket, steps, results))

    def _fail(self, bucket: Bucket, steps: Sequence[Step | None], error: Exception) -> None:
        log.error("a step of %s failed", bucket.name, exc_info=error)
        message = f"{bucket.name}: {type(error).__name__}: {error}"
        states, events = advance.fail_together(self._states, steps, message, self._now_ms())
        self._publish(states, events, self._metrics.count_failure)

    def _publish(self, states: tuple[State, ...], events: Sequence[Event], count: Callable[[], None] = lambda: None) -> None:
        """Makes new states the current ones, with what `count` counts, and then tells the clients."""
        ended = [event for event in events if isinstance(event, FinishEvent)]
        for event in ended:
            self._holdings[self._group_of.pop(event.request_id)].release(event.request_id)
        with self._wake:
            self._states = states
            count()
            self._count_events(events)
            deliveries = [(self._sinks[event.request_id], event) for event in events]
            for event in ended:
                del self._sinks[event.request_id]
        for sink, delivered in deliveries:
            self._deliver(sink, delivered)

    def _count_step(self, bucket: Bucket, steps: Sequence[Step | None], results: Sequence[advance.Results]) -> None:
        metrics = self._metrics
        turns = [turn for step in steps if step is not None for turn in step.turns]
        metrics.count_step(bucket, len(turns), len(steps))
        for turn, got in zip(turns, (one for group in results for one in group), strict=True):
            if got is None:
                metrics.discarded_rows += 1
            elif got.drafted:
                metrics.count_verified(got.drafted, len(got.tokens) - 1)
            elif got.tokens and turn.sample_index == 0:
                metrics.prompt_tokens += len(turn.request.prompt)

    def _count_events(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, TokenEvent):
                self._metrics.generation_tokens += len(event.token_ids)
            else:
                self._metrics.finished[event.reason] += 1
                # A stop token was generated but is in no TokenEvent.
                self._metrics.generation_tokens += event.reason == "stop"

    def _deliver(self, sink: Sink, event: Event) -> None:
        try:
            sink(event)
        except Exception:
            log.exception("the sink of %r raised on %s", event.request_id, type(event).__name__)
            if isinstance(event, TokenEvent):
                self.cancel(event.request_id)

    def _step_or_wait(self) -> bool:
        """One step, or a wait for something to do; false when stopping and nothing is left."""
        if self.step():
            return True
        with self._wake:
            if self._inbox:
                return True
            if self._refusal is not None:
                return False
            self._wake.wait(self._refresh_every_s)
        return True

    def _abandon(self, message: str) -> None:
        """Ends everything after a defect of the engine itself, so that no client waits for ever."""
        with self._wake:
            self._refusal = message
        self._receive()
        for group in range(len(self._states)):
            state, events = advance.fail_all(self._states[group], message, self._now_ms())
            self._publish(self._with(group, state), events)
