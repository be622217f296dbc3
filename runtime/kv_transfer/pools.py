"""The pools of a server's ranks as the source and the target of handovers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

from ...graphs.errors import NpucompileError
from ..request import ParkedEvent
from .layout import PAGES, SLOTS, Instance, LayoutError, Region
from .messages import Ready
from .segments import Pairs, segments
from .transfer_engine import Memory, Segment, TransferEngine

WAITING = 8
"""Handovers that a rank waits for at a time; the engine bounds what is in flight itself."""


class Peer(NamedTuple):
    """The other server.

    Attributes:
        sessions: of its ranks' transfer engines, dp groups one after the other.
    """

    instance: Instance
    sessions: Sequence[str]


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

    def write(self, source: ParkedEvent, peer: Peer, target: Ready, done: Callable[[str], None]) -> Callable[[], None]:
        """Writes the pages and the state of a parked request to a decode server; returns at once what keeps it from beginning more.

        Args:
            done: called once, by another thread, when no byte is in flight any more, with the reason where some may be missing.
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
    def areas(self) -> tuple[Memory, ...]:
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

    def plan(self, peer: Peer, group: int, pairs: Pairs) -> dict[str, list[Segment]]:
        """The segments that this rank writes, by session.

        Args:
            group: dp group of the decode server.

        Raises:
            LayoutError: there is no such group, page or slot.
        """
        ranks = peer.instance.group(group)
        return {
            peer.sessions[ranks[target]]: segments(own, peer.instance.ranks[ranks[target]], pairs)
            for target, own in shares(self.regions, self._rank, self._tp, peer.instance.tp)
        }

    def write(self, peer: Peer, group: int, pairs: Pairs, stopping: threading.Event) -> str:
        """Writes and waits until no byte is in flight; returns why some may be missing, or an empty text.

        Args:
            stopping: see `TransferEngine.write`.
        """
        transfers = []
        try:
            for session, own in self.plan(peer, group, pairs).items():
                transfers.append(self.transfer.write(session, own, stopping))
            reason = ""
        except (NpucompileError, LookupError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
        # All of them are waited for, whatever the first ones say.
        return next((result for result in [transfer.result() for transfer in transfers] if result), reason)

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

    def write(self, source: ParkedEvent, peer: Peer, target: Ready, done: Callable[[str], None]) -> Callable[[], None]:
        """See `Pools`."""
        stopping = threading.Event()
        self._waiting.submit(lambda: done(self._write(source, peer, target, stopping)))
        return stopping.set

    def close(self) -> None:
        """Waits for what is in flight."""
        self._waiting.shutdown()
        self._writer.close()

    def _write(self, source: ParkedEvent, peer: Peer, target: Ready, stopping: threading.Event) -> str:
        try:
            return self._writer.write(peer, target.group, pairs_of(source, target), stopping)
        except LayoutError as error:
            return str(error)


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
