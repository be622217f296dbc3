"""The serving loop: a thread that steps as long as there is something to do, and what becomes of requests when it cannot."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Queue
from typing import Any

from .delivery import Sink
from .executor import Executor, ExecutorError
from .request import Event, ExecutionRecord, FinishEvent
from .scheduler import advance
from .scheduler.request_state import RequestState
from .stepper import Stepper

JOIN_S = 2.0
"""How long `stop` waits for the stepping thread of an engine that failed."""


class Engine(Stepper):
    """The serving loop. `submit`, `cancel`, `stop` and `stats` may be called from any thread.

    Arguments and attributes are those of `Stepper`.
    """

    _thread: threading.Thread | None = None

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

    @staticmethod
    def from_loader(load_executor: Callable[[], Executor], on_failure: Callable[[], None] = lambda: None, **policy: Any) -> Engine:
        """Loads an executor and serves it, both on one new thread; returns when it is ready. `failure` then says why it serves no more.

        All tensor work belongs on one thread: OpenMP keeps a pool of workers for every thread that ever ran a parallel region, and
        with more workers than cores they sleep between operators instead of spinning, which doubles the time of a small step.

        Args:
            policy: arguments of the constructor.

        Raises:
            Exception: whatever `load_executor` or the engine's constructor raises.
        """
        ready: Queue[Engine | BaseException] = Queue(1)

        def run() -> None:
            try:
                engine = Engine(load_executor(), on_failure=on_failure, **policy)
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
    def thread_id(self) -> int | None:
        """The system's number of the thread that steps; None without one."""
        return self._thread.native_id if self._thread is not None else None

    @property
    def alive(self) -> bool:
        """Whether the engine takes requests and, if it was started, its thread runs."""
        return self._refusal is None and self.failure is None and (self._thread is None or self._thread.is_alive())

    def give_up(self, message: str) -> None:
        """Ends all requests with an error, from another thread: the one that steps hangs, and may hang for ever."""
        with self._wake:
            if self.failure is not None:
                return
            self._refusal = self.failure = message
            queued = [item for item in self._inbox if isinstance(item, RequestState)]
            known = {request.arrival: request for request in (*advance.live(self._state), *queued)}
            self._inbox.clear()
            live, self._live = self._live, {}
        deliveries: list[tuple[Sink, Event]] = []
        for name, (sink, arrival) in live.items():
            request = known.get(arrival)
            unknown = FinishEvent(name, "error", 0, 0, ExecutionRecord(), message)
            deliveries.append((sink, request.finish_event("error", self.now_ms(), message) if request else unknown))
        with self._wake:
            self._metrics.count_events([event for _, event in deliveries])
        self._send(deliveries)
        self._on_failure()

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
            self._wake.wait(self._refresher.every_s)
        return True

    def _abandon(self, message: str) -> None:
        """Ends all requests after a defect of the engine itself, so that no client waits for ever."""
        with self._wake:
            if self.failure is not None:
                return
            self._refusal = self.failure = message
        self._receive()
        self._publish(*advance.fail_all(self._state, message, self.now_ms()))
        self._on_failure()
