"""tests/support/machines.py: machines reach each other and nothing else, can be cut off, and leave nothing behind."""

from __future__ import annotations

import os
import socket
import subprocess
import threading

import pytest
from support.machines import HOSTS, PREFIX, machines


def spaces():
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
    return [name for name in listed if name.startswith(f"{PREFIX}-{os.getpid()}-")]


def connect(address, port):
    with socket.create_connection((address, port), timeout=1):
        return True


def test_machines_reach_each_other_until_one_is_cut_off():
    with machines(2) as (first, second):
        assert len(spaces()) == 3
        assert first.run(["hostname"]).stdout == "node0\n"
        resolved = [machine.run(["getent", "ahostsv4", "node0"]).stdout.split()[0] for machine in (first, second)]
        assert resolved == ["127.0.1.1", first.address]
        # Sockets keep the namespace that they were made in.
        with first.inside():
            listener = socket.create_server((first.address, 0))
        port = listener.getsockname()[1]
        with second.inside():
            assert connect(first.address, port)
            reached = []
            thread = threading.Thread(target=lambda: reached.append(connect(first.address, port)))
            thread.start()
            thread.join()
            assert reached == [True]
            second.cut()
            with pytest.raises(TimeoutError):
                connect(first.address, port)
            second.join()
            assert connect(first.address, port)
        listener.close()
        sleeping = second.popen(["sleep", "1000"])
        assert sleeping.poll() is None
    assert sleeping.poll() is not None
    assert spaces() == []
    assert not [path for path in HOSTS.glob("*") if path.name.startswith(f"{PREFIX}-{os.getpid()}-")]
