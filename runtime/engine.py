"""The serving engine: takes requests from any thread, has a stepper run them, and sends their events."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import Queue
from typing import Any

from ..graphs.errors import RequestError
from ..graphs.steps.score import SCORE
from . import delivery
from .delivery import LiveRequest, Sink
from .executor import Executor, ExecutorError
from .metrics import Metrics
from .request import Event, ExecutionRecord, FinishEvent, Flush, Landed, ParkedEvent, Request
from .scheduler import advance
from .scheduler.picture_admission import check_served
from .scheduler.request_state import RequestState
from .scheduler.state import SchedulerState
from .stepper import Count, Message, Stepper

JOIN_S = 2.0
"""How long `stop` waits for the stepping thread of an engine that failed."""


class Engine:
    """The serving loop. `submit`, `cancel`, `stop` and `stats` may be called from any thread.

    Sinks are called from the thread that steps, never with a lock held; a `BatchSink` once for all its events of a step. A sink that
    raises loses its request.

    Attributes:
        stepper: decides and runs the steps; for the thread that steps.
        failure: why no step can run any more; None while steps can.
        on_end: called with the FinishEvent of every request, after its sink, by the thread that ends it.

    Args:
        executor: runs the steps; only the stepping thread calls it, except for `compiles` and `backends`.
        on_failure: called once, by the stepping thread, when no step can run any more.
        settings: arguments of `Stepper`.

    Raises:
        SpecError: as `Stepper`.
    """

    def __init__(self, executor: Executor, *, on_failure: Callable[[], None] = lambda: None, **settings: Any) -> None:
        self.executor, self._on_failure = executor, on_failure
        self.stepper = Stepper(executor, self._publish, **settings)
        self._ledgers = [manager.pictures for manager in self.stepper.cache_managers if manager.pictures is not None]
        self.failure: str | None = None
        self.on_end: Callable[[FinishEvent], None] = lambda _: None
        self._thread: threading.Thread | None = None
        self._busy_since_s: float | None = None
        self._arrivals = itertools.count()
        # Guards all that follows.
        self._wake = threading.Condition()
        self._inbox: deque[Message] = deque()
        self._live: dict[str, LiveRequest] = {}
        self._metrics = Metrics(executor.limits.drafts, executor.limits.max_model_len)
        if self._ledgers:
            self._metrics.count_pictures(self._ledgers)
        self._state, self._used_pages = self.stepper.state, 0
        self._refusal: str | None = None
        self._holds = 0

    @staticmethod
    def from_loader(load_executor: Callable[[], Executor], on_failure: Callable[[], None] = lambda: None, **settings: Any) -> Engine:
        """Loads an executor and serves it, both on one new thread; returns when it is ready. `failure` then says why it serves no more.

        All tensor work belongs on one thread: OpenMP keeps a pool of workers for every thread that ever ran a parallel region, and
        with more workers than cores they sleep between operators instead of spinning, which doubles the time of a small step.

        Args:
            settings: arguments of the constructor.

        Raises:
            Exception: whatever `load_executor` or the engine's constructor raises.
        """
        ready: Queue[Engine | BaseException] = Queue(1)

        def run() -> None:
            try:
                engine = Engine(load_executor(), on_failure=on_failure, **settings)
                engine._thread = threading.current_thread()
            except BaseException as error:
                ready.put(error)
                return
            ready.put(engine)
            engine.run_forever()

        threading.Thread(target=run, name="npucompile-engine", daemon=True).start()
        engine = ready.get()
        if isinstance(engine, BaseException):
            raise engine
        return engine

    def submit(self, request: Request, sink: Sink) -> None:
        """Queues a request; its events go to `sink`, a FinishEvent last. A seed of None is drawn here.

        Raises:
            RequestError: when the request can never be served, its id is live, or the engine is stopping.
        """
        limits = self.executor.limits
        check_served(request, self.executor)
        if request.sampling.seed is None:
            request = replace(request, sampling=replace(request.sampling, seed=secrets.randbits(64)))
        with self._wake:
            if self._refusal is not None:
                raise RequestError(f"the engine takes no new requests: {self._refusal}", code="engine_stopped")
            if request.id in self._live:
                raise RequestError(f"id {request.id!r} is the id of a live request; legal is one that is not", param="id")
            arrival = next(self._arrivals)
            self._live[request.id] = LiveRequest(sink, arrival)
            record = ExecutionRecord(accepted_per_position=(0,) * limits.drafts)
            came_ms = self.stepper.now_ms() - request.waited_ms
            # A server that is handed a prompt over has it computed, and one that hands it over is asked for no scores.
            in_chunks = bool(SCORE.among(self.executor.buckets)) and not request.handover
            self._inbox.append(RequestState(request, arrival, came_ms, record, unscored=request.num_scored, in_chunks=in_chunks))
            if not self._holds:
                self._wake.notify_all()

    def hold(self) -> None:
        """Requests that are submitted until `release` do not wake an engine that has nothing to do, so that they begin together: the first
        one alone would run steps of one row, and the others wait for them. Several may hold; whoever does has to release."""
        with self._wake:
            self._holds += 1

    def release(self) -> None:
        """See `hold`."""
        with self._wake:
            self._holds -= 1
            if not self._holds:
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

    def landed(self, request_id: str, *, filled: bool = True) -> None:
        """Of a parked request the pages and the state are filled, or will not be (`Landed`)."""
        with self._wake:
            if request_id in self._live:
                self._inbox.append(Landed(self._live[request_id].arrival, filled))
                self._wake.notify_all()

    def flush_prefix_cache(self) -> bool:
        """Forgets all prefixes before the next step, also those that requests compute meanwhile; returns whether any are kept."""
        with self._wake:
            self._inbox.append(Flush())
            self._wake.notify_all()
        return self.stepper.prefix_cache is not None

    def has(self, request_id: str) -> bool:
        """Whether a request of this id is live."""
        with self._wake:
            return request_id in self._live

    def on_parked(self, told: Callable[[ParkedEvent], None]) -> None:
        """Has a function told when a request of a handover has its pages, or has computed them; by any thread."""
        self.stepper.on_parked = told

    @property
    def load(self) -> tuple[int, int]:
        """Live requests, and pages that they use."""
        with self._wake:
            return len(self._live), self._used_pages

    def known_pages(self, request: Request) -> int:
        """How many pages of a prompt the first dp group is known to have, by any thread: they may be gone when it is admitted."""
        prefixes = self.stepper.cache_managers[0].prefixes
        return prefixes.depth(request.cache_salt, request.prompt) if prefixes and not request.skip_reading_prefix_cache else 0

    def step(self) -> bool:
        """Handles what has arrived and does a step (`Stepper.step`); returns whether there was anything to do."""
        self._busy_since_s = time.monotonic()
        try:
            return self.stepper.step(self._received())
        finally:
            self._busy_since_s = None

    def run_forever(self) -> None:
        """Steps until `stop` is called and no request is live; waits without polling while there is nothing to do.

        A lost device or rank ends all requests as a defect of the engine does, but is not raised: `on_failure` is told.
        """
        try:
            while self._step_or_wait():
                pass
        except ExecutorError as error:
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

    def refuse(self, reason: str) -> None:
        """Takes no new requests."""
        with self._wake:
            self._refusal = self._refusal or reason
            self._wake.notify_all()

    def stop(self, *, drain: bool = True) -> None:
        """Refuses new requests, finishes (or, without `drain`, cancels) the live ones, and joins the thread if there is one."""
        with self._wake:
            self._refusal = self._refusal or "it is stopping"
            if not drain:
                self._inbox.extend(live.arrival for live in self._live.values())
            self._wake.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            # A thread that was given up hangs.
            self._thread.join(None if self.failure is None else JOIN_S)

    @property
    def alive(self) -> bool:
        """Whether the engine takes requests and, if it was started, its thread runs."""
        return self._refusal is None and self.failure is None and (self._thread is None or self._thread.is_alive())

    @property
    def step_age_s(self) -> float:
        """How long the current call of `step` has taken; 0 between steps."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def stats(self) -> dict[str, Any]:
        """Gauges and counters, consistent with each other; `kv_cache_usage_perc` is from 0 to 1."""
        with self._wake:
            groups, live, used, counters = self._state.groups, len(self._live), self._used_pages, self._metrics.snapshot()
        running = sum(len(group.running) for group in groups)
        return {
            "num_requests_running": running,
            "num_requests_waiting": live - running,
            "dp_requests_running": {rank: len(group.running) for rank, group in enumerate(groups)},
            "dp_requests_waiting": {rank: len(group.waiting) for rank, group in enumerate(groups)},
            "dp_prompt_tokens": {
                rank: sum(len(live.request.prompt) for live in (*group.running, *group.waiting)) for rank, group in enumerate(groups)
            },
            "kv_cache_usage_perc": used / (len(groups) * (self.executor.limits.num_pages - 1)),
            **counters,
            "compiles_after_ready_total": self.executor.compiles(),
            "backends": dict(self.executor.backends),
        }

    def give_up(self, message: str) -> None:
        """Ends all requests with an error, from another thread: the one that steps hangs, and may hang for ever."""
        with self._wake:
            if self.failure is not None:
                return
            self._refusal = self.failure = message
            queued = [item for item in self._inbox if isinstance(item, RequestState)]
            by_arrival = {request.arrival: request for request in (*advance.live(self._state), *queued)}
            self._inbox.clear()
            live, self._live = self._live, {}
        ends: list[FinishEvent] = []
        for name, (_, arrival) in live.items():
            request = by_arrival.get(arrival)
            unknown = FinishEvent(name, "error", 0, 0, ExecutionRecord(), message)
            ends.append(request.finish_event("error", self.stepper.now_ms(), message) if request else unknown)
        with self._wake:
            self._metrics.count_events(ends)
        self._send([(live[end.request_id].sink, end) for end in ends], ends)
        self._on_failure()

    def _received(self) -> list[Message]:
        with self._wake:
            messages = list(self._inbox)
            self._inbox.clear()
        return messages

    def _step_or_wait(self) -> bool:
        """Steps, or waits for something to do; returns false when the engine is stopping and no request is live."""
        if self.failure is not None:
            return False
        if self.step():
            return True
        with self._wake:
            if self._inbox:
                return True
            if self._refusal is not None:
                return False
            self._wake.wait(self.stepper.refresh_every_s)
        return True

    def _abandon(self, message: str) -> None:
        """Ends all requests after a defect of the engine itself, so that no client waits for ever."""
        with self._wake:
            if self.failure is not None:
                return
            self._refusal = self.failure = message
        self.stepper.receive(self._received())
        self.stepper.fail_all(message)
        self._on_failure()

    def _publish(self, state: SchedulerState, events: Sequence[Event], count: Count) -> None:
        """Shows other threads a new state of the stepper together with its counters, and sends the events to the sinks."""
        used_pages = state.used_pages
        with self._wake:
            self._state, self._used_pages = state, used_pages
            count(self._metrics)
            if self._ledgers:
                self._metrics.count_pictures(self._ledgers)
            # There are none after `give_up`, which ended all requests.
            deliveries = [(live.sink, event) for event in events if (live := self._live.get(event.request_id))]
            self._metrics.count_events([event for _, event in deliveries])
            ends = [event for _, event in deliveries if isinstance(event, FinishEvent)]
            for end in ends:
                del self._live[end.request_id]
        self._send(deliveries, ends)

    def _send(self, deliveries: Sequence[tuple[Sink, Event]], ends: Sequence[FinishEvent]) -> None:
        if lost := delivery.send(deliveries):
            self.cancel(*{event.request_id for event in lost})
        for event in ends:
            self.on_end(event)
