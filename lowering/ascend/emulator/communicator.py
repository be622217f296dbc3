"""A communicator of an emulated device: the members of a group exchange their inputs, and prove first that they run the same operator."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ....graphs.errors import LoweringError
from ..convert import shape_of

_HEADER = struct.Struct("<8sQQ16s472s")
"""Mark, number of the exchange, bytes of the inputs, fingerprint of the graph, operator and inputs as text."""
_MARK = b"npucomm1"
ROOM_BYTES = 256 << 10
"""How much of the inputs goes with the header; the rest follows when the headers agree, since gloo ends a process that is sent too much."""
_TAG = 1
_HUB = 0


@dataclass
class _Pending:
    """An exchange that is not over: the messages that this member waits for, by member; their first byte is zero until they come."""

    op: str
    messages: dict[int, torch.Tensor] = field(default_factory=dict)


class EmulatedCommunicator:
    """One group of ranks, as this member sees it. The first member collects the inputs and sends them to all.

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
        first = _HEADER.size + ROOM_BYTES
        if size == 1:
            self.ranks = (rank,)
        elif self.index == _HUB:
            self._received = {i: torch.empty(first, dtype=torch.uint8) for i in range(size) if i != _HUB}
        else:
            self._received = {_HUB: torch.empty(size * first, dtype=torch.uint8)}
        if size > 1:
            numbers = self._collected(_bytes(struct.pack("<Q", rank)), 8, "the numbers of its ranks")
            self.ranks = struct.unpack(f"<{size}Q", bytes(numbers.tolist()))

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    def exchange(self, op: object, inputs: Sequence[torch.Tensor], fingerprint: bytes) -> list[list[torch.Tensor]]:
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
        self._pending = _Pending(str(op), self._received)
        for message in self._received.values():
            message[0] = 0
        parts = [self._first(header, packed[:ROOM_BYTES], op)]
        self._pending.messages = {}
        if packed.numel() > ROOM_BYTES:
            rest = packed[ROOM_BYTES:]
            parts.append(self._collected(rest, rest.numel(), str(op)).view(self.size, -1))
        self._pending = None
        payloads = torch.cat(parts, 1)
        return [mine if i == self.index else _unpacked(payloads[i], mine) for i in range(self.size)]

    def waiting(self) -> str | None:
        """Which exchange is not over and which ranks have not come to it; None where there is none."""
        pending = self._pending
        if pending is None:
            return None
        absent = [self.ranks[i] for i, message in pending.messages.items() if not message[0]]
        if not absent:
            whom = f"the inputs of ranks {list(self.ranks)}"
        elif self.index == _HUB or self.size == 2:
            whom = f"ranks {absent} of {list(self.ranks)}"
        else:
            whom = f"rank {absent[0]}, which collects the inputs of ranks {list(self.ranks)}"
        return f"{pending.op} on communicator {self.name!r} waits for {whom}"

    def _first(self, header: torch.Tensor, payload: torch.Tensor, op: object) -> torch.Tensor:
        """Exchanges headers and the first part of the inputs; returns these parts [members, bytes] once all headers are the same."""
        sent, what, length = torch.cat((header, payload)), str(op), _HEADER.size
        if self.index != _HUB:
            self._transfer(sends={_HUB: sent}, receives=self._received, what=what)
            answer = self._received[_HUB]
        else:
            self._transfer(sends={}, receives=self._received, what=what)
            messages = [sent, *self._received.values()]
            agreed = all(torch.equal(message[:length], header) for message in messages)
            stop = length + payload.numel() if agreed else length
            answer = torch.cat([*(message[:length] for message in messages), *(message[length:stop] for message in messages)])
            self._transfer(sends=dict.fromkeys(self._received, answer), receives={}, what=what)
        for i in range(self.size):
            self._check(header, answer[i * length : (i + 1) * length], i)
        start = self.size * length
        return answer[start : start + self.size * payload.numel()].view(self.size, -1)

    def _collected(self, sent: torch.Tensor, nbytes: int, what: str) -> torch.Tensor:
        """The bytes of all members side by side, so many of each."""
        whole = torch.empty(self.size * nbytes, dtype=torch.uint8)
        if self.index != _HUB:
            self._transfer(sends={_HUB: sent}, receives={_HUB: whole}, what=what)
            return whole
        parts = list(whole.split(nbytes))
        parts[_HUB].copy_(sent)
        self._transfer(sends={}, receives={i: parts[i] for i in range(1, self.size)}, what=what)
        self._transfer(sends=dict.fromkeys(range(1, self.size), whole), receives={}, what=what)
        return whole

    def _transfer(self, *, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor], what: str) -> None:
        assert self._gloo is not None
        current: int | None = None
        try:
            works = [(i, self._gloo.recv([buffer], i, _TAG)) for i, buffer in receives.items()]
            works += [(i, self._gloo.send([data], i, _TAG)) for i, data in sends.items()]
            for member, work in works:
                current = member
                work.wait()
        except RuntimeError as error:
            ranks = f"rank {self.ranks[current]}" if current is not None else f"ranks {list(self.ranks)}"
            state = self.waiting() or f"communicator {self.name!r} waits for {what}"
            raise LoweringError(f"{state}; {ranks} did not answer: {error}") from error

    def _check(self, header: torch.Tensor, other: torch.Tensor, member: int) -> None:
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


def _header(count: int, nbytes: int, fingerprint: bytes, op: object, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
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
