"""Keeps the threads of a step from spinning while others want their processors."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from ...runtime.cpu_executor import CpuExecutor
from ...runtime.engine import Engine

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.02
STOP_SHARE, STOP_LOOKS = 0.4, 4
"""Of its time that the stepping thread is ready and has no processor, so many looks in a row, from which on threads do not spin: others
want the processors. A server's own threads and a client beside it take 0.07 in the median and 0.3 now and then."""

FREE_SHARE, FREE_S = 0.15, 1.0
"""Below this share, averaged over such a time, they are free again."""


class Team(Protocol):
    """Threads that do nothing."""

    def end(self) -> None:
        """They end."""


class OpenMpTeam:
    """A pool of OpenMP workers beside that of the steps, asleep.

    libgomp lets a thread that waits for others spin 300,000 times, some 10 ms, but only 1,000 times while the process has more OpenMP
    threads than processors (libgomp/config/linux/wait.h, `do_spin`); that is all that these are for. They belong to a thread of their
    own, since every thread that runs a parallel region has a pool, which ends with it.
    """

    def __init__(self) -> None:
        self._over = threading.Event()
        threading.Thread(target=self._run, name="npucompile-no-spinning", daemon=True).start()

    def _run(self) -> None:
        # Large enough for torch to call all workers of 64 processors.
        torch.zeros(2**21).add_(1)
        self._over.wait()

    def end(self) -> None:
        """See `Team`."""
        self._over.set()


class SpinGuard:
    """Has a team as long as the stepping thread has to wait for processors.

    Threads of a step meet hundreds of times. One that spins until another comes uses up its share of a processor that others want, and
    is without one when the other has come: on two processors with two more busy threads, steps of 5 ms took up to 0.5 s. Threads that
    sleep are woken up in time; where nobody else wants the processors, waking them up makes small steps three times as slow.

    Args:
        waited_s: a clock of how long that thread has been ready without a processor.
        clock: monotonic seconds.
        team: makes one.
    """

    def __init__(
        self, waited_s: Callable[[], float], clock: Callable[[], float] = time.monotonic, team: Callable[[], Team] = OpenMpTeam
    ) -> None:
        self._new_team, self._clock, self._waited_s = team, clock, waited_s
        self._seen_s, self._seen_waited_s = clock(), waited_s()
        self._team: Team | None = None
        self._looks, self._average = 0, 0.0

    def look(self) -> None:
        """Starts or ends the team, by what the thread waited since the last call."""
        now_s, waited_s = self._clock(), self._waited_s()
        elapsed_s = max(now_s - self._seen_s, 1e-9)
        share = (waited_s - self._seen_waited_s) / elapsed_s
        self._seen_s, self._seen_waited_s = now_s, waited_s
        if self._team is not None:
            self._average += (share - self._average) * min(1.0, elapsed_s / FREE_S)
            if self._average < FREE_SHARE:
                self.close()
            return
        self._looks = self._looks + 1 if share >= STOP_SHARE else 0
        if self._looks == STOP_LOOKS:
            log.info("steps wait %.0f %% of their time for a processor: their threads sleep while they wait for each other", 100 * share)
            self._team, self._average = self._new_team(), share

    def close(self) -> None:
        """Ends the team."""
        if self._team is not None:
            self._team.end()
            self._team, self._looks = None, 0


def guard_spinning(engine: Engine) -> None:
    """Starts a thread that keeps a guard for the engine until it ends; none for devices, for a single thread, and where the system does
    not say how long threads wait (Linux does)."""
    schedstat = Path(f"/proc/self/task/{engine.thread_id}/schedstat")
    if not isinstance(engine.executor, CpuExecutor) or torch.get_num_threads() < 2 or not schedstat.exists():
        return

    def waited_s() -> float:
        return int(schedstat.read_bytes().split()[1]) / 1e9

    def run() -> None:
        # Its file goes when the stepping thread has ended.
        with contextlib.suppress(OSError), contextlib.closing(SpinGuard(waited_s)) as guard:
            while engine.alive:
                time.sleep(LOOK_EVERY_S)
                guard.look()

    threading.Thread(target=run, name="npucompile-spin-guard", daemon=True).start()
