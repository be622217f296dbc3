"""The machines of a deployment as ranks know them: who each is, who is missing, and whether each reaches each other one."""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .control_plane import RankError

CONNECT_S = 3.0
"""How long a machine may take to answer a connection. One that does not answer in this time has no route back, or is off."""

FIRST_SAID_S, SAID_S = 2.0, 10.0
"""When it is first said who is waited for, and how often after that."""

POLL_S = 0.2


@dataclass(frozen=True)
class ClusterNode:
    """A machine.

    Attributes:
        rank: its number, from 0.
        count: of machines.
        host: its name, for messages alone.
        address: as the other machines reach it; "" on a deployment of one machine.
    """

    rank: int = 0
    count: int = 1
    host: str = ""
    address: str = ""

    def __str__(self) -> str:
        return f"node rank {self.rank} ({self.host} at {self.address})"


Say = Callable[[str], None]


@dataclass
class Reminder:
    """Says what is waited for, early and then from time to time."""

    say: Say
    one_machine: bool = False
    _next_s: float = 0.0

    def __post_init__(self) -> None:
        self._next_s = time.monotonic() + (SAID_S if self.one_machine else FIRST_SAID_S)

    def due(self) -> bool:
        """Whether it is time; each call that returns True starts the next interval."""
        if time.monotonic() < self._next_s:
            return False
        self._next_s = time.monotonic() + SAID_S
        return True


def missing_nodes(world_size: int, count: int, present: Collection[int]) -> str:
    """The machines that are missing, and ranks of those that are not, which are still starting; every machine has as many.

    Args:
        present: ranks, with rank 0.
    """
    size = world_size // count
    missing = []
    for node in range(count):
        own = range(node * size, (node + 1) * size)
        lacking = [rank for rank in own if rank not in present]
        if lacking:
            absent = len(lacking) == size
            missing.append(f"node rank {node} ({numbered(lacking)})" if absent else f"{numbered(lacking)} of node rank {node}")
    return ", ".join(missing)


def numbered(ranks: Sequence[int]) -> str:
    """Ranks in ascending order, as words."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def wait_for_listener(
    node: ClusterNode, host: str, port: int, timeout_s: float, say: Say, exited: Callable[[], str | None] = lambda: None
) -> None:
    """Waits until node rank 0 listens, and says meanwhile what keeps it.

    Raises:
        RankError: it does not within this time, or a process without which nothing is to be waited for has `exited`.
    """
    deadline, reminder = time.monotonic() + timeout_s, Reminder(say)
    where = f"{host} port {port}"
    while failure := reach(node.address, host, port):
        text, code = failure, "node_unreachable"
        if "refused" in failure:
            text, code = "nothing listens there yet", "node_late"
        if time.monotonic() > deadline:
            raise RankError(f"node rank {node.rank} did not find node rank 0 at {where} within {timeout_s:g} s: {text}", code)
        if reason := exited():
            raise RankError(reason)
        if reminder.due():
            say(f"waiting for node rank 0 at {where}: {text} [{code}]")
        time.sleep(POLL_S)


def reach(address: str, host: str, port: int) -> str:
    """Why a port cannot be connected to from an address of this machine; "" if it can."""
    try:
        socket.create_connection((host, port), CONNECT_S, (address, 0) if address else None).close()
    except TimeoutError:
        return f"no answer within {CONNECT_S:g} s to {address}: the machine is off, or has no route back to this address"
    except OSError as error:
        if error.errno == errno.ECONNREFUSED:
            return "refused"
        return f"from {address}: {error.strerror or error}"
    return ""


@contextlib.contextmanager
def reachable(node: ClusterNode) -> Iterator[int]:
    """A port of this machine that the others can try, for the length of a `with`; 0 where there are no others."""
    if node.count == 1:
        yield 0
        return
    with socket.create_server((node.address, 0), family=family(node.address), backlog=node.count) as listener:
        yield listener.getsockname()[1]


def unreached(node: ClusterNode, others: Mapping[int, tuple[str, int]]) -> dict[int, str]:
    """Which other machines this one does not reach, and why.

    Args:
        others: address and port of `reachable` by node rank.
    """
    failures = {rank: reach(node.address, address, port) for rank, (address, port) in others.items() if rank != node.rank}
    return {rank: failure for rank, failure in failures.items() if failure}


def family(address: str) -> socket.AddressFamily:
    """Of an address in numbers."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET
