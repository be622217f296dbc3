"""What a rank other than 0 does of handovers: it opens a transfer engine over its pools, and writes what rank 0 tells it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ...graphs.types import Mesh
from ..executor import Executor
from ..kv_transfer.layout import Instance
from ..kv_transfer.lease import Lease, clock_s
from ..kv_transfer.mooncake import Mooncake
from ..kv_transfer.pools import WAITING, RankWriter, reason_of
from .control_plane import error_text

KINDS = ("transfer", "reopen", "peer", "lease", "write", "stop_writing", "receive")
"""Messages of rank 0 that are for this."""

MOST_PEERS = 64
"""Servers, and leases, that a rank remembers, the last ones that it was told of."""

Answer = Callable[..., None]
Later = Callable[[Callable[[], None]], None]
T = TypeVar("T")


class RankTransfers:
    """Handles the messages `KINDS`. Its methods are called by the thread of the steps, which never waits here.

    Args:
        executor: of this rank.
        rank: of this process.
        mesh: of all ranks.
        stream: the connection to rank 0.
        answer: sends an answer to rank 0: the number of the question, the reason why it is not done or "", and other fields.
    """

    def __init__(self, executor: Executor, rank: int, mesh: Mesh, stream: socket.socket, answer: Answer) -> None:
        self._executor, self._rank, self._mesh, self._stream = executor, rank, mesh, stream
        self._answer = answer
        self._writer: RankWriter | None = None
        self._peers: dict[int, Instance] = {}
        self._leases: dict[int, Lease] = {}
        # By number of a write that has not ended.
        self._stopping: dict[int, threading.Event] = {}
        self._threads = ThreadPoolExecutor(WAITING, thread_name_prefix="kv-transfer-result")

    def received(self, kind: str, fields: Mapping[str, Any], later: Later) -> None:
        """Handles one message.

        Args:
            later: calls a function once the steps that were launched have ended. They may still use pages that are to be sent, or
                overwritten by a peer: rank 0 has heard of their end from the first rank of each group alone.
        """
        if kind == "transfer":
            self._open(**fields)
        elif kind == "reopen":
            # It waits for the end of an engine.
            self._threads.submit(self._reopen, **fields)
        elif kind == "peer":
            _remember(self._peers, fields["peer"], Instance.from_json(fields["instance"]))
        elif kind == "lease":
            lease = self._leases.pop(fields["lease"], None) or Lease()
            _remember(self._leases, fields["lease"], lease)
            lease.extend(fields["until_s"])
            self._answer(fields["number"], "", clock_s=clock_s())
        elif kind == "write":
            later(self._write(**fields))
        elif kind == "stop_writing":
            if fields["write"] in self._stopping:
                self._stopping[fields["write"]].set()
        else:
            number, numbers = fields["number"], fields["numbers"]
            later(lambda: self._executor.receive(0, numbers, lambda: self._answer(number, "")))

    def close(self) -> None:
        """Waits for the writes in flight, and answers them."""
        self._threads.shutdown()
        if self._writer is not None:
            self._writer.close()

    def _open(self, number: int, host: str, protocol: str) -> None:
        if self._writer is not None:
            self._writer.close()
        own, other = self._stream.getsockname()[0], self._stream.getpeername()[0]
        try:
            # On the machine of rank 0 peers reach this rank as they reach that one.
            transfer = Mooncake(host if own == other else own, protocol, self._executor.enter)
            self._writer = RankWriter(transfer, self._executor, self._mesh.coordinates(self._rank)["tp"], self._mesh.axis("tp"))
        except Exception as error:
            self._answer(number, error_text(error))
            return
        addresses = [region.address for region in self._writer.regions]
        self._answer(number, "", session=transfer.session, addresses=addresses, clock_s=clock_s())

    def _reopen(self, number: int) -> None:
        assert self._writer is not None
        transfer = self._writer.transfer
        reason = reason_of(transfer.reopen)
        self._answer(number, reason, session=transfer.session, clock_s=clock_s())

    def _write(
        self, number: int, write: int, peer: int, lease: int, group: int, sessions: Sequence[str], pairs: Mapping[str, list[list[int]]]
    ) -> Callable[[], None]:
        """What starts a write."""
        # Of a peer or a lease that is forgotten nothing is known, and nothing is written.
        writer, target, held = self._writer, self._peers.get(peer), self._leases.get(lease, Lease())
        stopping = self._stopping[write] = threading.Event()
        numbers = {axis: [(source, place) for source, place in own] for axis, own in pairs.items()}

        def run() -> None:
            reason = f"rank {self._rank} does not know peer {peer}"
            if writer is not None and target is not None:
                reason = writer.write(target, group, sessions, numbers, lambda: not (stopping.is_set() or held.over))
            del self._stopping[write]
            self._answer(number, reason)

        def start() -> None:
            self._threads.submit(run)

        return start


def _remember(by_number: dict[int, T], number: int, value: T) -> None:
    """Keeps the last `MOST_PEERS`."""
    by_number[number] = value
    while len(by_number) > MOST_PEERS:
        del by_number[next(iter(by_number))]
