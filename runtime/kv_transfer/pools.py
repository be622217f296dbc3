"""The pools of a server's ranks as the source and the target of handovers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

from ...graphs.errors import NpucompileError
from ..request import ParkedEvent
from .layout import PAGES, SLOTS, Instance, Region
from .messages import Ready
from .segments import segments
from .transfer_engine import Memory, TransferEngine

WAITING = 8
"""Handovers that are waited for at a time; the engine bounds what is in flight itself."""


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

    def write(self, source: ParkedEvent, peer: Peer, target: Ready, done: Callable[[str], None]) -> None:
        """Writes the pages and the state of a parked request to a decode server; returns at once.

        Args:
            done: called by another thread when no byte is in flight any more, with the reason where some may be missing.
        """
        ...

    def close(self) -> None:
        """Waits for what is in flight."""
        ...


class LocalPools:
    """The pools of a server of one rank, in this process.

    Args:
        transfer: writes; its memory is registered here.
        regions: `layout.regions` of the rank.
    """

    def __init__(self, transfer: TransferEngine, regions: Sequence[Region]) -> None:
        self._transfer, self._regions = transfer, regions
        self.ranks: tuple[tuple[Region, ...], ...] = (tuple(regions),)
        transfer.register([Memory(region.address, region.nbytes) for region in regions])
        self._waiting = ThreadPoolExecutor(WAITING, thread_name_prefix="kv-transfer-result")

    @property
    def sessions(self) -> list[str]:
        """See `Pools`."""
        return [self._transfer.session]

    def write(self, source: ParkedEvent, peer: Peer, target: Ready, done: Callable[[str], None]) -> None:
        """See `Pools`."""
        self._waiting.submit(lambda: done(self._write(source, peer, target)))

    def close(self) -> None:
        """Waits for what is in flight."""
        self._waiting.shutdown()
        self._transfer.close()

    def _write(self, source: ParkedEvent, peer: Peer, target: Ready) -> str:
        try:
            if len(source.pages) != len(target.pages):
                return f"{len(source.pages)} pages were computed, and there are {len(target.pages)} for them"
            pairs = {PAGES: [*zip(source.pages, target.pages, strict=True)][target.known :], SLOTS: [(source.slot, target.slot)]}
            regions, session = peer.instance.ranks[target.group], peer.sessions[target.group]
            return self._transfer.write(session, segments(self._regions, regions, pairs)).result()
        except (NpucompileError, LookupError, TypeError) as error:
            return f"{type(error).__name__}: {error}"
