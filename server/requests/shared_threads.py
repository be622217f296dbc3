"""Threads that clients share: whose work is next, so that the slow work of one client holds up that of no other.

Clients take turns by the seconds that their work has taken, as the scheduler's do by tokens (`runtime/scheduler/turns.py`): next is whoever
has least running, then whoever was served least; who had nothing waiting starts level with who was served last. A client never has all of
many threads, and work that lasts, by its nature or because some of its client's did lately, leaves one of two free for what does not.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

asking: contextvars.ContextVar[str] = contextvars.ContextVar("npucompile_asking", default="")
"""The client whose request is handled (`door.CLIENT`); tasks that it starts inherit it."""

LASTING_S = 1.0
"""Work that took longer lasts, and for LATELY_S its client's other work is taken to last as well."""

LATELY_S = 60.0
MAX_CLIENTS = 4096
"""Of whom it is known what they were served; of more, those that are ahead of no other are forgotten."""

T = TypeVar("T")


@dataclass(frozen=True)
class _Job:
    client: str
    lasts: bool
    work: Callable[[], Any]
    result: Future[Any] = field(default_factory=Future)


class SharedThreads:
    """Some threads.

    Args:
        count: of them.
        name: that theirs begin with.
    """

    def __init__(self, count: int, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._threads, self._clock = ThreadPoolExecutor(count, name), clock
        self._most_lasting, self._most_of_one = max(1, count - 1), count - count // 4
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[_Job]] = {}
        self._running, self._lasting = Counter[str](), 0
        self._served_s: dict[str, float] = {}
        self._level_s = 0.0
        self._slow_until_s: dict[str, float] = {}

    def submit(self, work: Callable[[], T], *, lasts: bool | None = None) -> Future[T]:
        """What work for the client that asks comes to, once it is its turn.

        Args:
            lasts: whether it may by its nature; None goes by what its client's took lately.
        """
        client = asking.get()
        with self._lock:
            lasting = self._slow_until_s.get(client, 0.0) > self._clock() if lasts is None else lasts
            context = contextvars.copy_context()
            job = _Job(client, lasting, lambda: context.run(work))
            self._waiting.setdefault(client, deque()).append(job)
        self._threads.submit(self._run)
        return job.result

    def close(self) -> None:
        """Waits for what runs; what waits is cancelled."""
        with self._lock:
            jobs = [job for waiting in self._waiting.values() for job in waiting]
            self._waiting.clear()
        for job in jobs:
            job.result.cancel()
        self._threads.shutdown(cancel_futures=True)

    def _run(self) -> None:
        # What lasts may have to wait for what does, and is then taken by whoever has run that.
        while (job := self._next()) is not None:
            began_s = self._clock()
            if job.result.set_running_or_notify_cancel():
                try:
                    job.result.set_result(job.work())
                except BaseException as error:
                    job.result.set_exception(error)
            self._ended(job, self._clock() - began_s)

    def _next(self) -> _Job | None:
        with self._lock:
            free = self._lasting < self._most_lasting
            able = [client for client in self._waiting if self._running[client] < self._most_of_one]
            clients = able if free else [client for client in able if not self._waiting[client][0].lasts]
            if not clients:
                return None
            client = min(clients, key=lambda name: (self._running[name], self._count(name)))
            job = self._waiting[client].popleft()
            if not self._waiting[client]:
                del self._waiting[client]
            self._level_s = self._count(client)
            self._running[client] += 1
            self._lasting += job.lasts
            return job

    def _count(self, client: str) -> float:
        return max(self._served_s.get(client, 0.0), self._level_s)

    def _ended(self, job: _Job, seconds: float) -> None:
        with self._lock:
            self._lasting -= job.lasts
            self._running[job.client] -= 1
            self._running += Counter()
            self._served_s[job.client] = self._count(job.client) + seconds
            if seconds > LASTING_S:
                self._slow_until_s[job.client] = self._clock() + LATELY_S
            if len(self._served_s) > MAX_CLIENTS:
                self._served_s = {name: served_s for name, served_s in self._served_s.items() if served_s > self._level_s}
                self._slow_until_s = {name: until_s for name, until_s in self._slow_until_s.items() if until_s > self._clock()}
