"""A lease ends by a clock that goes on while its process stands still."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from npucompile.runtime.kv_transfer.lease import Lease, clock_s


def test_a_lease_that_nobody_extends_is_over_and_never_gets_shorter() -> None:
    lease = Lease()
    assert lease.over
    lease.extend(clock_s() + 60)
    until_s = lease.until_s
    assert not lease.over
    lease.extend(clock_s() - 1)
    assert (lease.until_s, lease.over) == (until_s, False)
    lease.until_s = clock_s()
    assert lease.over


def test_the_clock_counts_the_pause_of_a_process_and_is_that_of_others() -> None:
    program = """
import os, signal, threading, time
from npucompile.runtime.kv_transfer.lease import Lease, clock_s
lease = Lease()
lease.extend(clock_s() + 0.3)
assert not lease.over
os.kill(os.getpid(), signal.SIGSTOP)
print(lease.over, clock_s())
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    stat = Path(f"/proc/{process.pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    time.sleep(0.4)
    process.send_signal(signal.SIGCONT)
    over, now_s = process.communicate(timeout=20)[0].split()
    assert over == "True"
    assert abs(float(now_s) - clock_s()) < 5
