"""Machines for tests: network namespaces on a switch, each with an address, an interface, a host name and a hosts file of its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support import optional, ranks

PREFIX = "npuc"
"""Namespaces are PREFIX-PID-NAME, so that those of a run that was killed can be told."""

HOSTS = Path("/etc/netns")
"""`ip netns exec` binds what is here over /etc."""

CLONE_NEWNET = 0x40000000
NAMED = 'hostname "$0" && exec "$@"'


@dataclass
class Machine:
    """A namespace with one interface.

    Attributes:
        name: of the host. As on Debian its own hosts file has it at 127.0.1.1; those of the others have its address.
        address: on the network of all machines.
        interface: that has the address; its name differs from machine to machine.
    """

    name: str
    address: str
    interface: str
    _space: str
    _port: str
    _processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def run(self, arguments: Sequence[object], seconds: float = ranks.TIMEOUT_S, **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end; `options` as of subprocess.run."""
        options = {"env": ranks.environment(), "capture_output": True, "text": True, "timeout": seconds} | options
        return subprocess.run(self._command(arguments), check=False, **options)

    def popen(self, arguments: Sequence[object], environment: Mapping[str, str] | None = None, given: bytes = b"") -> subprocess.Popen[str]:
        """Starts a command, as `ranks.spawn` does; its process id is the command's own. Killed at the end at the latest."""
        process = ranks.spawn(self._command(arguments), ranks.environment() if environment is None else environment, given)
        self._processes.append(process)
        return process

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Sockets that this thread, and threads it starts, make meanwhile are this machine's. Host names are still the test's own."""
        libc = ctypes.CDLL(None, use_errno=True)

        def enter(path: str) -> None:
            with open(path) as space:
                if libc.setns(space.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), f"cannot enter {path}")

        with open("/proc/thread-self/ns/net") as own:
            enter(f"/run/netns/{self._space}")
            try:
                yield
            finally:
                libc.setns(own.fileno(), CLONE_NEWNET)

    def cut(self) -> None:
        """Takes the machine off the switch: packets vanish in silence, and its interface stays up."""
        _ip("-n", _switch(), "link", "set", self._port, "nomaster")

    def join(self) -> None:
        """Puts it back."""
        _ip("-n", _switch(), "link", "set", self._port, "master", "switch")

    def _command(self, arguments: Sequence[object]) -> list[str]:
        return ["ip", "netns", "exec", self._space, "unshare", "--uts", "sh", "-c", NAMED, self.name, *map(str, arguments)]


@contextlib.contextmanager
def machines(count: int) -> Iterator[list[Machine]]:
    """That many machines on one network, `node0` at 10.77.0.1 first; skips the test where there can be none. One set at a time.

    All their processes are killed, and namespaces, links and files removed on leaving.
    """
    optional.network_namespaces()
    _remove_those_of_ended_runs()
    members = [Machine(f"node{i}", f"10.77.0.{i + 1}", f"ether{i}", _space(f"node{i}"), f"port{i}") for i in range(count)]
    try:
        _ip("netns", "add", _switch())
        _ip("-n", _switch(), "link", "add", "switch", "type", "bridge")
        _ip("-n", _switch(), "link", "set", "switch", "up")
        for machine in members:
            _connect(machine, members)
        yield members
    finally:
        for machine in members:
            _remove(machine._space)
            for process in machine._processes:
                process.communicate()
        _remove(_switch())


def _connect(machine: Machine, members: Sequence[Machine]) -> None:
    space = machine._space
    _ip("netns", "add", space)
    _ip("-n", _switch(), "link", "add", machine._port, "type", "veth", "peer", "name", machine.interface, "netns", space)
    machine.join()
    _ip("-n", _switch(), "link", "set", machine._port, "up")
    _ip("-n", space, "address", "add", f"{machine.address}/24", "dev", machine.interface)
    for interface in ("lo", machine.interface):
        _ip("-n", space, "link", "set", interface, "up")
    hosts = ["127.0.0.1 localhost", *(f"{'127.0.1.1' if other is machine else other.address} {other.name}" for other in members)]
    (HOSTS / space).mkdir(parents=True)
    (HOSTS / space / "hosts").write_text("\n".join(hosts) + "\n")


def _remove(space: str) -> None:
    """Ends the processes of a namespace and removes it; one that does not exist is none."""
    shutil.rmtree(HOSTS / space, ignore_errors=True)
    # Again until there are none: a process may start another one meanwhile.
    while pids := subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=False).stdout.split():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", space], capture_output=True, check=False)


def _remove_those_of_ended_runs() -> None:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
    for space in listed:
        prefix, _, rest = space.partition("-")
        if prefix == PREFIX and not os.path.exists(f"/proc/{rest.partition('-')[0]}"):
            _remove(space)


def _space(name: str) -> str:
    return f"{PREFIX}-{os.getpid()}-{name}"


def _switch() -> str:
    return _space("switch")


def _ip(*arguments: str) -> None:
    process = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert process.returncode == 0, f"ip {' '.join(arguments)}: {process.stderr}"
