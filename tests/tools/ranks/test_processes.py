"""tools/ranks/processes.py: ranks are started with their settings, watched, and ended."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time

from npucompile.runtime.distributed.rendezvous import RendezvousConfig
from npucompile.tools.ranks import processes as module
from npucompile.tools.ranks.processes import RankProcesses
from npucompile.tools.ranks.rank_settings import RankSettings


def started(processes, *codes):
    for rank, code in enumerate(codes, start=1):
        processes._processes[rank] = subprocess.Popen([sys.executable, "-S", "-c", code])
    return processes


def test_how_a_rank_ended_is_known():
    processes = started(RankProcesses(), "import time; time.sleep(60)", "raise SystemExit(3)")
    assert processes.exit_reason(2) == f"process {processes._processes[2].pid} ended with status 3"
    assert processes.first_exit() == f"rank 2 ended before it was ready: {processes.exit_reason(2)}; it says why above, if it could"
    processes._processes[1].kill()
    assert processes.exit_reason(1) == f"process {processes._processes[1].pid} was killed by signal 9 (SIGKILL)"
    assert processes.exit_reason(7) is None
    assert processes.killed() == [f"rank 1: {processes.exit_reason(1)}"]


def test_a_rank_that_does_not_end_is_killed(monkeypatch):
    monkeypatch.setattr(module, "EXIT_S", 0.2)
    monkeypatch.setattr(module, "EXIT_STATUS_S", 0.05)
    processes = started(RankProcesses(), "import time; time.sleep(60)", "pass")
    assert processes.exit_reason(1) is None
    processes.stop()
    assert processes._processes[1].returncode == -signal.SIGKILL
    assert processes._processes[2].returncode == 0


def test_nobody_waits_for_ranks_that_are_not_wanted(monkeypatch):
    processes = started(RankProcesses(), "import time; time.sleep(60)")
    processes.stop(within_s=0)
    assert processes._processes[1].returncode == -signal.SIGKILL


def test_ranks_behind_the_first_one_of_a_machine_are_started(monkeypatch, tmp_path):
    commands = []

    class Started:
        stdin = io.BytesIO()

        def __init__(self, command, **_):
            commands.append(command[-3:])

    monkeypatch.setattr(module.subprocess, "Popen", Started)
    RankProcesses().start(tmp_path, RendezvousConfig(3, 9, "host", 1, 2), RankSettings(), {})
    assert commands == [[str(tmp_path), "4", str(os.getpid())]]


def test_a_rank_works_while_it_uses_a_processor():
    processes = started(RankProcesses(), "while True: pass", "import time; time.sleep(60)")
    try:
        assert not processes.working([1, 3])  # it did not start the third
        deadline = time.monotonic() + 30
        for _ in range(3):
            time.sleep(0.05)
            while not processes.working([1, 2]):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        processes._processes[1].send_signal(signal.SIGSTOP)
        for rank in (2, 1):
            processes.working([rank])
            time.sleep(0.3)
            # It may still have been starting.
            while processes.working([rank]):
                assert time.monotonic() < deadline
                time.sleep(0.3)
    finally:
        processes._processes[1].send_signal(signal.SIGCONT)
        processes.stop(within_s=0)
