"""A communicator of an emulated device: the members of a group exchange their inputs, and prove first that they run the same operator."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ....graphs.errors import LoweringError
from ..convert import shape_of
from .ge_ops_common import GeOp

_HEADER = struct.Struct("<8sQQ16s472s")
"""Mark, number of the exchange, bytes of the inputs, fingerprint of the graph, operator and inputs as text."""
_MARK = b"npucomm1"
SLOT_BYTES = 4096
"""Size of the first message of an exchange: the header, and as much of the inputs as fits behind it."""
_TAG = 1


@dataclass
class _Pending:
    """An exchange that is not over: the first messages, by member, stay zero until they come."""

    op: str
    slots: dict[int, torch.Tensor] = field(default_factory=dict)


class Communicator:
    """One group of ranks, as this member sees it.

    Attributes:
        name: as graphs name it.
        index: number of this process in the group.
        ranks: numbers of the members among all ranks.

    Args:
        group: a torch process group with a gloo backend, or None for a group of one.
        rank: number of this process among all.

    Raises:
        LoweringError: the members do not answer.
    """

    def __init__(self, name: str, group: Any, rank: int) -> None:
        self.name, self._count = name, 0
        self._pending: _Pending | None = None
        self.index = 0 if group is None else int(group.rank())
        size = 1 if group is None else int(group.size())
        self._gloo = group._get_backend(torch.device("cpu")) if size > 1 else None
        self.ranks: tuple[int, ...] = tuple(range(size))
        if size > 1:
            numbers = self._swap({i: torch.empty(8, dtype=torch.uint8) for i in self._peers()}, _bytes(struct.pack("<Q", rank)), "a rank")
            known = {i: struct.unpack("<Q", bytes(number.tolist()))[0] for i, number in numbers.items()} | {self.index: rank}
            self.ranks = tuple(known[i] for i in range(size))
        else:
            self.ranks = (rank,)

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    def exchange(self, op: GeOp, inputs: Sequence[torch.Tensor], fingerprint: bytes) -> list[list[torch.Tensor]]:
        """Sends the inputs of an operator to all members and receives theirs.

        Args:
            fingerprint: 16 bytes that are the same where the members run the same graph.

        Returns:
            by member its inputs, shaped like this member's.

        Raises:
            LoweringError: a member runs another operator, has other shapes or dtypes, or does not come; names both sides.
        """
        mine = list(inputs)
        if self._gloo is None:
            return [mine]
        self._count += 1
        packed = _packed(mine)
        header = _header(self._count, packed.numel(), fingerprint, op, mine)
        room = SLOT_BYTES - _HEADER.size
        slot = torch.zeros(SLOT_BYTES, dtype=torch.uint8)
        slot[: _HEADER.size] = header
        slot[_HEADER.size : _HEADER.size + min(room, packed.numel())] = packed[:room]
        pending = _Pending(str(op), {i: torch.zeros(SLOT_BYTES, dtype=torch.uint8) for i in self._peers()})
        self._pending = pending
        received = self._swap(pending.slots, slot, str(op))
        for i, other in received.items():
            self._check(op, header, other[: _HEADER.size], i)
        payloads = {i: other[_HEADER.size : _HEADER.size + min(room, packed.numel())] for i, other in received.items()}
        if packed.numel() > room:
            rest = packed[room:].contiguous()
            more = self._swap({i: torch.empty_like(rest) for i in self._peers()}, rest, str(op))
            payloads = {i: torch.cat((payloads[i], more[i])) for i in payloads}
        self._pending = None
        return [mine if i == self.index else _unpacked(payloads[i], mine) for i in range(self.size)]

    def waiting(self) -> str | None:
        """Which exchange is not over and which ranks have not come to it; None where there is none."""
        pending = self._pending
        if pending is None:
            return None
        absent = [self.ranks[i] for i, slot in pending.slots.items() if not slot[0]]
        ranks = f"ranks {absent} of {list(self.ranks)}" if absent else f"the inputs of ranks {list(self.ranks)}"
        return f"{pending.op} on communicator {self.name!r} waits for {ranks}"

    def _peers(self) -> list[int]:
        return [i for i in range(self.size) if i != self.index]

    def _swap(self, received: dict[int, torch.Tensor], sent: torch.Tensor, what: str) -> dict[int, torch.Tensor]:
        assert self._gloo is not None
        current: int | None = None
        try:
            receives = [(i, self._gloo.recv([buffer], i, _TAG)) for i, buffer in received.items()]
            sends = [(i, self._gloo.send([sent], i, _TAG)) for i in received]
            for member, work in (*receives, *sends):
                current = member
                work.wait()
        except RuntimeError as error:
            ranks = f"rank {self.ranks[current]}" if current is not None else f"ranks {list(self.ranks)}"
            state = self.waiting() or f"{what} on communicator {self.name!r}"
            raise LoweringError(f"{state}; {ranks} did not answer: {error}") from error
        return received

    def _check(self, op: GeOp, header: torch.Tensor, other: torch.Tensor, member: int) -> None:
        if torch.equal(header, other):
            return
        mine, theirs = _read(header), _read(other)
        ranks = f"rank {self.ranks[self.index]}", f"rank {self.ranks[member]}"
        raise LoweringError(
            f"communicator {self.name!r} is used in another order or with other inputs by its members: {ranks[0]} runs {mine}, {ranks[1]}"
            f" runs {theirs}; legal is the same on all"
        )


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _header(count: int, nbytes: int, fingerprint: bytes, op: GeOp, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    text = f"{op} of {', '.join(map(shape_of, inputs))}".encode()[:472]
    return _bytes(_HEADER.pack(_MARK, count, nbytes, fingerprint, text))


def _read(header: torch.Tensor) -> str:
    mark, count, nbytes, fingerprint, text = _HEADER.unpack(bytes(header.tolist()))
    if mark != _MARK:
        return f"something that is no exchange ({mark!r})"
    return f"exchange {count}, {text.rstrip(bytes(1)).decode()}, {nbytes} bytes, of graph {fingerprint.hex()[:8]}"


def _packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)


def _unpacked(payload: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    tensors, start = [], 0
    for tensor in like:
        stop = start + tensor.nbytes
        # Parts of one message need not begin where their dtype may.
        tensors.append(payload[start:stop].clone().view(tensor.dtype).reshape(tensor.shape))
        start = stop
    return tensors
