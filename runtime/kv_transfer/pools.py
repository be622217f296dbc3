"""The pools of a server's ranks as the source and the target of handovers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

from ..distributed.control_plane import error_text
from ..request import ParkedEvent
from .layout import PAGES, SLOTS, Instance, LayoutError, Region
from .lease import Lease
from .messages import Ready
from .segments import Pairs, segments
from .transfer_engine import RegisteredMemory, Segment, TransferEngine

WAITING = 8
"""Handovers that a rank waits for at a time; the engine bounds what is in flight itself."""


class Peer(NamedTuple):
    """The other server.

    Attributes:
        sessions: of its ranks' transfer engines, dp groups one after the other.
    """

    instance: Instance
    sessions: Sequence[str]

    def group(self, number: int) -> Sequence[str]:
        """The sessions of a dp group.

        Raises:
            LayoutError: there is no such group, or not a session for each rank.
        """
        ranks = self.instance.group(number)
        if len(self.sessions) != len(self.instance.addresses):
            raise LayoutError(f"{len(self.sessions)} sessions of {len(self.instance.addresses)} ranks; legal is one each")
        if wrong := [session for session in self.sessions if not isinstance(session, str)]:
            raise LayoutError(f"a session {wrong[0]!r}; legal is a text")
        return [self.sessions[rank] for rank in ranks]


class Pools(Protocol):
    """All ranks' pools, dp groups one after the other.

    Attributes:
        ranks: regions of each rank.
    """

    ranks: tuple[tuple[Region, ...], ...]

    @property
    def sessions(self) -> list[str]:
        """By which peers reach each rank's pools."""
        ...

    def lease(self) -> Lease:
        """One for a connection, without which nothing is written."""
        ...

    def write(self, source: ParkedEvent, peer: Peer, target: Ready, lease: Lease, done: Callable[[str], None]) -> Callable[[], None]:
        """Writes the pages and the state of a parked request to a decode server; returns at once what keeps it from beginning more.

        Args:
            lease: one of `lease`; after its end nothing is begun.
            done: called once, by another thread, when no byte is in flight any more, with the reason where some may be missing.
        """
        ...

    def reopen(self, done: Callable[[str], None]) -> None:
        """Closes the pools to all who write to them, and opens them under other sessions.

        Args:
            done: called once, by another thread, with the reason where they could not be opened again; closed they are.
        """
        ...

    def close(self) -> None:
        """Waits for what is in flight."""
        ...


class HasPools(Protocol):
    """The part of an executor that this is about."""

    @property
    def regions(self) -> tuple[Region, ...]:
        """See `Executor`."""
        ...

    @property
    def areas(self) -> tuple[RegisteredMemory, ...]:
        """See `Executor`."""
        ...


class RankWriter:
    """One rank's pools, and the engine that writes them. Its methods may be called from any thread.

    Args:
        transfer: the memory of the pools is registered with it here.
        executor: of the rank.
        rank: its number in its dp group.
        tp: ranks of its group.
    """

    def __init__(self, transfer: TransferEngine, executor: HasPools, rank: int, tp: int) -> None:
        self.transfer, self.regions, self._rank, self._tp = transfer, executor.regions, rank, tp
        transfer.register(executor.areas)

    def plan(self, peer: Instance, group: int, sessions: Sequence[str], pairs: Pairs) -> dict[str, list[Segment]]:
        """The segments that this rank writes, by session.

        Args:
            group: dp group of the decode server.
            sessions: of the ranks of that group.

        Raises:
            LayoutError: there is no such group, page or slot.
        """
        ranks = peer.group(group)
        return {
            sessions[target]: segments(own, peer.rank(ranks[target]), pairs)
            for target, own in shares(self.regions, self._rank, self._tp, peer.tp)
        }

    def write(self, peer: Instance, group: int, sessions: Sequence[str], pairs: Pairs, allowed: Callable[[], bool]) -> str:
        """Writes and waits until no byte is in flight; returns why some may be missing, or an empty text.

        Args:
            allowed: see `TransferEngine.write`.
        """
        transfers, reasons = [], []
        try:
            for session, own in self.plan(peer, group, sessions, pairs).items():
                transfers.append(self.transfer.write(session, own, allowed))
        except Exception as error:
            reasons.append(error_text(error))
        # All of them are waited for, whatever the first ones say.
        for transfer in transfers:
            try:
                reasons.append(transfer.result())
            except Exception as error:
                reasons.append(error_text(error))
        return next(filter(None, reversed(reasons)), "")

    def close(self) -> None:
        """Waits for what is in flight, and forgets the memory."""
        self.transfer.close()


class LocalPools:
    """The pools of a server of one rank, in this process.

    Args:
        transfer: writes; its memory is registered here.
        executor: of the rank.
    """

    def __init__(self, transfer: TransferEngine, executor: HasPools) -> None:
        self._writer = RankWriter(transfer, executor, 0, 1)
        self.ranks: tuple[tuple[Region, ...], ...] = (self._writer.regions,)
        self._waiting = ThreadPoolExecutor(WAITING, thread_name_prefix="kv-transfer-result")

    @property
    def sessions(self) -> list[str]:
        """See `Pools`."""
        return [self._writer.transfer.session]

    def lease(self) -> Lease:
        """See `Pools`."""
        return Lease()

    def write(self, source: ParkedEvent, peer: Peer, target: Ready, lease: Lease, done: Callable[[str], None]) -> Callable[[], None]:
        """See `Pools`."""
        stopping = threading.Event()
        self._waiting.submit(lambda: done(self._write(source, peer, target, lambda: not (stopping.is_set() or lease.over))))
        return stopping.set

    def reopen(self, done: Callable[[str], None]) -> None:
        """See `Pools`."""
        self._waiting.submit(lambda: done(reason_of(self._writer.transfer.reopen)))

    def close(self) -> None:
        """Waits for what is in flight."""
        self._waiting.shutdown()
        self._writer.close()

    def _write(self, source: ParkedEvent, peer: Peer, target: Ready, allowed: Callable[[], bool]) -> str:
        try:
            sessions, pairs = peer.group(target.group), pairs_of(source, target)
        except LayoutError as error:
            return str(error)
        return self._writer.write(peer.instance, target.group, sessions, pairs, allowed)


def reason_of(function: Callable[[], None]) -> str:
    """Calls a function; returns why it did not do what it is for, or an empty text."""
    try:
        function()
    except Exception as error:
        return error_text(error)
    return ""


def shares(regions: Sequence[Region], rank: int, tp: int, target_tp: int) -> list[tuple[int, list[Region]]]:
    """What a rank writes to which ranks of a dp group of the decode server.

    Ranks of equally many write to the rank of their number. Otherwise every rank holds all of each pool (`layout.check`), and the pools
    of each target are shared out among the sources, to the one that has the fewest bytes so far.

    Args:
        regions: of the rank, as of all others of its group.
        rank: its number in its group.
        tp: ranks of its group.
        target_tp: ranks of the other server's group.
    """
    if tp == target_tp:
        return [(rank, list(regions))]
    result = []
    for target in range(target_tp):
        own, nbytes = list[Region](), [0] * tp
        for region in regions:
            source = min(range(tp), key=lambda number: (nbytes[number], (number - target) % tp))
            nbytes[source] += region.item_bytes
            own += [region] if source == rank else []
        result.append((target, own))
    return result


def pairs_of(source: ParkedEvent, target: Ready) -> Pairs:
    """Which pages and slots of a request go where.

    Raises:
        LayoutError: the decode server has another number of pages for it.
    """
    if len(source.pages) != len(target.pages):
        raise LayoutError(f"{len(source.pages)} pages were computed, and there are {len(target.pages)} for them")
    return {PAGES: [*zip(source.pages, target.pages, strict=True)][target.known :], SLOTS: [(source.slot, target.slot)]}
