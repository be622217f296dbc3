"""The pools of a server of several ranks: rank 0 tells each rank what to write, and each has a transfer engine of its own."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from ..distributed.messages import encode
from ..distributed.rank_transfers import MOST_PEERS
from ..distributed.sharded_executor import ShardedExecutor
from ..request import ParkedEvent
from .layout import LayoutError, Region
from .messages import Ready
from .pools import WAITING, Peer, RankWriter, pairs_of
from .transfer_engine import TransferEngine, TransferError

Done = Callable[[str], None]


class ShardedPools:
    """`Pools` of all ranks; this process is rank 0.

    Args:
        transfer: of rank 0.
        host: by which peers reach the machine of rank 0; a rank on another one is reached as rank 0 reaches it.
        protocol: of the engines of the other ranks.

    Raises:
        TransferError: a rank cannot start its engine, or is lost.
        LayoutError: there is a pool that no handover knows.
    """

    def __init__(self, executor: ShardedExecutor, transfer: TransferEngine, host: str, protocol: str) -> None:
        self._control_plane, mesh = executor.control_plane, executor.control_plane.mesh
        self._tp = mesh.axis("tp")
        answers: queue.SimpleQueue[tuple[int, Mapping[str, Any]]] = queue.SimpleQueue()
        for rank in self._control_plane.ranks:
            answered = lambda fields, rank=rank: answers.put((rank, fields))  # noqa: E731
            self._control_plane.ask(rank, "transfer", answered, host=host, protocol=protocol)
        self._writer = RankWriter(transfer, executor, 0, self._tp)
        by_rank = dict(answers.get() for _ in self._control_plane.ranks)
        for rank, fields in sorted(by_rank.items()):
            if reason := fields["reason"]:
                raise TransferError(f"rank {rank}: {reason}")
        others = [by_rank[rank] for rank in range(1, mesh.size)]
        self._sessions = [transfer.session, *(fields["session"] for fields in others)]
        self.ranks: tuple[tuple[Region, ...], ...] = (
            self._writer.regions,
            *(
                tuple(replace(region, address=address) for region, address in zip(self._writer.regions, fields["addresses"], strict=True))
                for fields in others
            ),
        )
        self._idle, self._in_flight = threading.Condition(), 0
        self._peers: dict[int, Peer] = {}
        self._numbers, self._writes = itertools.count(1), itertools.count(1)
        # One thread tells the ranks, so that they know a peer before they are to write to it; the others wait for rank 0's own writes.
        self._telling = ThreadPoolExecutor(1, thread_name_prefix="kv-transfer-ranks")
        self._waiting = ThreadPoolExecutor(WAITING, thread_name_prefix="kv-transfer-result")

    @property
    def sessions(self) -> list[str]:
        """See `Pools`."""
        return list(self._sessions)

    def write(self, source: ParkedEvent, peer: Peer, target: Ready, done: Done) -> Callable[[], None]:
        """See `Pools`. Where a rank is lost, its part ends with it, and those of the others when they have ended."""
        with self._idle:
            self._in_flight += 1
        write, stopping = next(self._writes), threading.Event()
        self._telling.submit(self._write, source, peer, target, done, write, stopping)

        def stop() -> None:
            stopping.set()
            frame = encode("stop_writing", write=write)
            for rank in self._ranks(source):
                if rank:
                    self._telling.submit(self._control_plane.send, rank, frame)

        return stop

    def close(self) -> None:
        """Waits for what is in flight; the other ranks close their engines when they end."""
        with self._idle:
            self._idle.wait_for(lambda: not self._in_flight)
        for threads in (self._telling, self._waiting):
            threads.shutdown()
        self._writer.close()

    def _ranks(self, source: ParkedEvent) -> Sequence[int]:
        return range(source.group * self._tp, (source.group + 1) * self._tp)

    def _write(self, source: ParkedEvent, peer: Peer, target: Ready, done: Done, write: int, stopping: threading.Event) -> None:
        ranks = self._ranks(source)
        try:
            pairs = pairs_of(source, target)
        except LayoutError as error:
            self._done(done, str(error))
            return
        answered = self._joined(len(ranks), done)
        if 0 in ranks:
            self._waiting.submit(lambda: answered({"reason": self._writer.write(peer, target.group, pairs, stopping)}))
        number = self._number(peer)
        for rank in ranks:
            if rank:
                self._control_plane.ask(rank, "write", answered, write=write, peer=number, group=target.group, pairs=pairs)

    def _number(self, peer: Peer) -> int:
        """By which the ranks know a peer; those that they do not know yet are told to them."""
        for number, known in self._peers.items():
            if known.instance is peer.instance and known.sessions == peer.sessions:
                return number
        number = next(self._numbers)
        self._peers[number] = peer
        while len(self._peers) > MOST_PEERS:
            del self._peers[next(iter(self._peers))]
        frame = encode("peer", peer=number, instance=peer.instance.to_json(), sessions=list(peer.sessions))
        for rank in self._control_plane.ranks:
            self._control_plane.send(rank, frame)
        return number

    def _joined(self, count: int, done: Done) -> Callable[[Mapping[str, Any]], None]:
        """What is called by each of so many ranks, and tells of all of them when the last one has answered."""
        reasons, lock = list[str](), threading.Lock()

        def answered(fields: Mapping[str, Any]) -> None:
            with lock:
                reasons.append(str(fields["reason"]))
                last = len(reasons) == count
            if last:
                self._done(done, next(filter(None, reasons), ""))

        return answered

    def _done(self, done: Done, reason: str) -> None:
        try:
            done(reason)
        finally:
            with self._idle:
                self._in_flight -= 1
                self._idle.notify_all()
