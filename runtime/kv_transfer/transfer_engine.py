"""The interface of an engine that writes this process's memory into that of another one: Mooncake's in service, a scripted one in tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ...graphs.errors import NpucompileError

PROTOCOLS = ("tcp", "rdma", "ascend")
"""How engines move bytes."""


class TransferError(NpucompileError):
    """Raised when an engine cannot start, or memory cannot be registered."""


class Segment(NamedTuple):
    """So many bytes from one address to another."""

    source: int
    target: int
    nbytes: int


class RegisteredMemory(NamedTuple):
    """A range that the engine may read and that peers may write."""

    address: int
    nbytes: int


class Transfer(Protocol):
    """Writes that were started."""

    def result(self) -> str:
        """Waits until no byte is in flight; returns why a part of them may be missing, or an empty text where all have arrived."""
        ...


class TransferEngine(Protocol):
    """One of a process. All of its methods may be called from any thread.

    Attributes:
        session: by which peers reach its memory; another one after it had to be replaced.
    """

    session: str

    def register(self, memory: Sequence[RegisteredMemory]) -> None:
        """Makes memory known, once, before the first transfer.

        Raises:
            TransferError: the engine refuses it.
        """
        ...

    def write(self, session: str, segments: Sequence[Segment], allowed: Callable[[], bool]) -> Transfer:
        """Starts writes to a peer. They may be tried again: the same bytes go to the same places.

        Args:
            allowed: is asked before each segment, or each batch of them, is begun; whether it may be.

        Raises:
            TransferError: a segment does not read registered memory. The engines themselves do not notice.
        """
        ...

    def reopen(self) -> None:
        """Closes all connections of peers that write to the memory, also of those that stand still, and takes writes under another session.

        Raises:
            TransferError: it is closed, and cannot be opened. The next call tries it again.
        """
        ...

    def close(self) -> None:
        """Waits for writes in flight, and forgets the memory."""
        ...
