"""What a rank other than 0 does of handovers: it opens a transfer engine over its pools, and writes what rank 0 tells it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...graphs.types import Mesh
from ..executor import Executor
from ..kv_transfer.layout import Instance
from ..kv_transfer.mooncake import Mooncake
from ..kv_transfer.pools import WAITING, Peer, RankWriter
from .control_plane import error_text

KINDS = ("transfer", "peer", "write", "stop_writing", "receive")
"""Messages of rank 0 that are for this."""

MOST_PEERS = 64
"""Servers that a rank remembers, the last ones that it was told of."""

Answer = Callable[..., None]
Later = Callable[[Callable[[], None]], None]


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
        self._peers: dict[int, Peer] = {}
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
        elif kind == "peer":
            self._peers[fields["peer"]] = Peer(Instance.from_json(fields["instance"]), fields["sessions"])
            while len(self._peers) > MOST_PEERS:
                del self._peers[next(iter(self._peers))]
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
        self._answer(number, "", session=transfer.session, addresses=[region.address for region in self._writer.regions])

    def _write(self, number: int, write: int, peer: int, group: int, pairs: Mapping[str, list[list[int]]]) -> Callable[[], None]:
        """What starts a write."""
        writer, target = self._writer, self._peers[peer]
        assert writer is not None
        stopping = self._stopping[write] = threading.Event()
        numbers = {axis: [(source, place) for source, place in own] for axis, own in pairs.items()}

        def run() -> None:
            try:
                reason = writer.write(target, group, numbers, stopping)
            except Exception as error:
                reason = error_text(error)
            del self._stopping[write]
            self._answer(number, reason)

        def start() -> None:
            self._threads.submit(run)

        return start
