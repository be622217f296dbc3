"""The processes of the other ranks of a machine, which its first rank starts and ends."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from ...runtime.distributed.rendezvous import RendezvousConfig
from .rank_settings import RankSettings

EXIT_S = 5.0
"""How long a rank may take to end by itself when nothing is left to do."""

EXIT_STATUS_S = 1.0
"""How long to wait for the exit status of a rank whose connection is lost."""


class RankProcesses:
    """The ranks that this process started, and ends."""

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._worked_s: dict[int, float] = {}

    def start(self, path: Path, config: RendezvousConfig, settings: RankSettings, environment: Mapping[str, str]) -> None:
        """Starts the ranks of this machine behind this one, `config.rank`."""
        description = pickle.dumps((config, replace(settings, threads=torch.get_num_threads())))
        for rank in range(config.rank + 1, config.rank + config.local_world_size):
            command = [sys.executable, "-m", f"{__package__}.rank", str(path), str(rank), str(os.getpid())]
            process = subprocess.Popen(command, env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
            self._processes[rank] = process
            # Unlike a command line, nobody else can read it: the token is part of it.
            with contextlib.suppress(BrokenPipeError), process.stdin or io.BytesIO() as stdin:
                stdin.write(description)

    def first_exit(self) -> str | None:
        """Which rank has ended, and how; None while all run."""
        rank = next((rank for rank, process in self._processes.items() if process.poll() is not None), None)
        return None if rank is None else f"rank {rank} ended before it was ready: {self.exit_reason(rank)}; it says why above, if it could"

    def working(self, ranks: Collection[int]) -> bool:
        """Whether all these ranks are processes of this one, of which one has used a processor since this was last asked. Importing takes
        minutes where a disk or the processors are slow, and a process that hangs uses none."""
        before, self._worked_s = self._worked_s, {}
        for rank in ranks:
            if rank not in self._processes:
                return False
            with contextlib.suppress(OSError, ValueError):
                fields = Path(f"/proc/{self._processes[rank].pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
                self._worked_s[rank] = float(fields[11]) + float(fields[12])  # utime and stime (man proc_pid_stat)
        return any(worked_s > before.get(rank, 0.0) for rank, worked_s in self._worked_s.items())

    def exit_reason(self, rank: int) -> str | None:
        """How a rank's process ended; None when it still runs, or this process did not start it."""
        process = self._processes.get(rank)
        if process is None:
            return None
        try:
            status = process.wait(EXIT_STATUS_S)
        except subprocess.TimeoutExpired:
            return None
        if status < 0:
            return f"process {process.pid} was killed by signal {-status} ({signal.Signals(-status).name})"
        return f"process {process.pid} ended with status {status}"

    def killed(self) -> list[str]:
        """Which ranks a signal has ended."""
        return [f"rank {rank}: {self.exit_reason(rank)}" for rank, process in self._processes.items() if (process.poll() or 0) < 0]

    def stop(self, within_s: float = EXIT_S) -> None:
        """Waits until all have ended, and kills those that do not end in time."""
        deadline = time.monotonic() + within_s
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
