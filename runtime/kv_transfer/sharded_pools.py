"""The pools of a server of several ranks: rank 0 tells each rank what to write, and each has a transfer engine of its own."""

from __future__ import annotations

import functools
import itertools
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..distributed.messages import encode
from ..distributed.rank_transfers import MOST_PEERS
from ..distributed.sharded_executor import ShardedExecutor
from ..request import ParkedEvent
from .layout import Instance, LayoutError, Region
from .lease import Lease, clock_s
from .messages import Ready
from .pools import WAITING, Peer, RankWriter, pairs_of, reason_of
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
        # Of each other rank, its clock less that of this process, or less than that: what it said, when its answer was read.
        self.clocks: dict[int, float] = {}
        self._writer = RankWriter(transfer, executor, 0, self._tp)
        addresses: dict[int, Sequence[int]] = {}
        self._sessions = dict[int, str]()
        answers: queue.SimpleQueue[str] = queue.SimpleQueue()

        def opened(rank: int, fields: Mapping[str, Any]) -> None:
            addresses[rank] = fields["addresses"]

        self._ask_all("transfer", opened, answers.put, host=host, protocol=protocol)
        if reason := answers.get():
            raise TransferError(reason)
        self._sessions[0] = transfer.session
        self.ranks: tuple[tuple[Region, ...], ...] = (
            self._writer.regions,
            *(
                tuple(region.at(address) for region, address in zip(self._writer.regions, addresses[rank], strict=True))
                for rank in range(1, mesh.size)
            ),
        )
        self._idle, self._in_flight = threading.Condition(), 0
        self._peers: dict[int, Instance] = {}
        self._numbers = itertools.count(1)
        # One thread tells the ranks, so that they know a peer before they are to write to it; the others wait for rank 0's own writes.
        self._telling = ThreadPoolExecutor(1, thread_name_prefix="kv-transfer-ranks")
        self._waiting = ThreadPoolExecutor(WAITING, thread_name_prefix="kv-transfer-result")

    @property
    def sessions(self) -> list[str]:
        """See `Pools`."""
        return [session for _, session in sorted(self._sessions.items())]

    def lease(self) -> Lease:
        """See `Pools`."""
        return _RanksLease(next(self._numbers), self)

    def write(self, source: ParkedEvent, peer: Peer, target: Ready, lease: Lease, done: Done) -> Callable[[], None]:
        """See `Pools`. Where a rank is lost, its part ends with it, and those of the others when they have ended."""
        assert isinstance(lease, _RanksLease)
        with self._idle:
            self._in_flight += 1
        write, stopping = next(self._numbers), threading.Event()
        self._telling.submit(self._write, source, peer, target, lease, done, write, stopping)

        def stop() -> None:
            stopping.set()
            frame = encode("stop_writing", write=write)
            for rank in self._ranks(source):
                if rank:
                    self._telling.submit(self._control_plane.send, rank, frame)

        return stop

    def reopen(self, done: Done) -> None:
        """See `Pools`."""
        answered = self._joined(2, done)
        self._ask_all("reopen", lambda rank, fields: None, lambda reason: answered({"reason": reason}))

        def own() -> None:
            reason = reason_of(self._writer.transfer.reopen)
            self._sessions[0] = self._writer.transfer.session
            answered({"reason": reason})

        self._waiting.submit(own)

    def extend(self, number: int, until_s: float) -> None:
        """Tells the ranks that a lease is over later, before they are told of what is written under it."""
        ignore = lambda *_: None  # noqa: E731
        self._telling.submit(self._ask_all, "lease", ignore, ignore, lease=number, until_s=until_s)

    def close(self) -> None:
        """Waits for what is in flight; the other ranks close their engines when they end."""
        with self._idle:
            self._idle.wait_for(lambda: not self._in_flight)
        for threads in (self._telling, self._waiting):
            threads.shutdown()
        self._writer.close()

    def _ranks(self, source: ParkedEvent) -> Sequence[int]:
        return range(source.group * self._tp, (source.group + 1) * self._tp)

    def _write(
        self, source: ParkedEvent, peer: Peer, target: Ready, lease: _RanksLease, done: Done, write: int, stopping: threading.Event
    ) -> None:
        ranks = self._ranks(source)
        try:
            sessions, pairs = peer.group(target.group), pairs_of(source, target)
        except LayoutError as error:
            self._done(done, str(error))
            return
        answered = self._joined(len(ranks), lambda reason: self._done(done, reason))
        to: dict[str, Any] = {"group": target.group, "sessions": sessions, "pairs": pairs}
        if 0 in ranks:
            allowed = lambda: not (stopping.is_set() or lease.over)  # noqa: E731
            self._waiting.submit(lambda: answered({"reason": self._writer.write(peer.instance, **to, allowed=allowed)}))
        number = self._number(peer.instance)
        for rank in ranks:
            if rank:
                self._control_plane.ask(rank, "write", answered, write=write, peer=number, lease=lease.number, **to)

    def _ask_all(self, kind: str, each: Callable[[int, Mapping[str, Any]], None], done: Done, **fields: Any) -> None:
        """Asks all other ranks; `done` is told of the first reason when all have answered. A time is one of this process."""
        ranks = self._control_plane.ranks
        if not ranks:
            done("")
            return
        answered = self._joined(len(ranks), done)

        def answer(rank: int, fields: Mapping[str, Any]) -> None:
            reason = fields["reason"]
            if not reason:
                self.clocks[rank] = fields["clock_s"] - clock_s()
                if "session" in fields:
                    self._sessions[rank] = fields["session"]
                each(rank, fields)
            answered({"reason": f"rank {rank}: {reason}" if reason else ""})

        for rank in ranks:
            own = {**fields, "until_s": fields["until_s"] + self.clocks[rank]} if "until_s" in fields else fields
            self._control_plane.ask(rank, kind, functools.partial(answer, rank), **own)

    def _number(self, peer: Instance) -> int:
        """By which the ranks know a peer; those that they do not know yet are told to them."""
        for number, known in self._peers.items():
            if known is peer:
                return number
        number = next(self._numbers)
        self._peers[number] = peer
        while len(self._peers) > MOST_PEERS:
            del self._peers[next(iter(self._peers))]
        frame = encode("peer", peer=number, instance=peer.to_json())
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
                done(next(filter(None, reasons), ""))

        return answered

    def _done(self, done: Done, reason: str) -> None:
        try:
            done(reason)
        finally:
            with self._idle:
                self._in_flight -= 1
                self._idle.notify_all()


class _RanksLease(Lease):
    """A lease that all ranks are told of, each in its own clock.

    Args:
        number: by which they know it.
    """

    def __init__(self, number: int, pools: ShardedPools) -> None:
        super().__init__()
        self.number, self._pools = number, pools

    def extend(self, until_s: float) -> None:
        """See `Lease`."""
        super().extend(until_s)
        self._pools.extend(self.number, self.until_s)
