"""Parameters in a device's memory: only those that its executables read, each in the format they want, and values derived from them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..graphs.errors import ArtifactTampered
from ..graphs.types import Bucket, Leaf
from ..lowering.device import Device, DeviceExecutable

LoadParams = Callable[[Collection[str]], Iterable[tuple[str, torch.Tensor]]]
"""Names of parameters -> each of them once: its name and this rank's shard, contiguous, in host memory."""


class _Use(NamedTuple):
    """An operand of an executable."""

    bucket: Bucket
    position: int


@dataclass
class _Derived:
    """One value that is computed from parameters, whichever executables read it.

    Attributes:
        number: among the derived values of the first of `uses`.
        sources: positions of the parameters that it is computed from.
    """

    number: int
    sources: tuple[int, ...]
    uses: list[_Use] = field(default_factory=list)


class DeviceParams:
    """Places parameters on a device, one at a time: host memory holds one of them, and those that a derived value still waits for.

    Args:
        leaves: an artifact's parameters, with this rank's shapes.
        executables: by bucket; equal operands of several share memory.
        operands: number of operands of each bucket's signature, behind which its derived values come.
    """

    def __init__(
        self, device: Device, leaves: Sequence[Leaf], executables: Mapping[Bucket, DeviceExecutable], operands: Mapping[Bucket, int]
    ) -> None:
        self._device, self._leaves, self._executables = device, leaves, executables
        self._uses = {
            position: uses
            for position in range(len(leaves))
            if (uses := [_Use(bucket, position) for bucket, executable in executables.items() if position in executable.reads])
        }
        self._derived: dict[str, _Derived] = {}
        for bucket, executable in executables.items():
            for number, value in enumerate(executable.derived(leaves)):
                derived = self._derived.setdefault(value.expression, _Derived(number, value.sources))
                derived.uses.append(_Use(bucket, operands[bucket] + number))
        self._placed: dict[_Use, torch.Tensor] = {}

    def load(self, load_params: LoadParams) -> None:
        """Reads and places all of them.

        Raises:
            ArtifactTampered: a parameter was not read, or has another shape or dtype than the artifact says.
        """
        waiting = dict(self._derived)
        needed = {*self._uses, *(source for derived in waiting.values() for source in derived.sources)}
        positions = {self._leaves[position].name: position for position in sorted(needed)}
        host: list[torch.Tensor | None] = [None] * len(self._leaves)
        for name, tensor in load_params(tuple(positions)):
            position = positions.pop(name)
            self._check(position, tensor)
            self._place(self._uses.get(position, ()), tensor)
            host[position] = tensor
            del tensor
            self._derive(waiting, host)
        if positions:
            raise ArtifactTampered(f"{len(positions)} parameters were not read, {next(iter(positions))} among them")

    def operands(self, bucket: Bucket, others: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """All operands of a bucket's executable: parameters, `others`, derived values; None where it reads none."""
        params = [self._placed.get(_Use(bucket, position)) for position in range(len(self._leaves))]
        first = len(params) + len(others)
        count = len(self._executables[bucket].derived(self._leaves))
        return [*params, *others, *(self._placed[_Use(bucket, first + number)] for number in range(count))]

    @property
    def nbytes(self) -> int:
        """Bytes of the device's memory that they take."""
        return sum({id(tensor): tensor.nbytes for tensor in self._placed.values()}.values())

    def _check(self, position: int, tensor: torch.Tensor) -> None:
        leaf = self._leaves[position]
        if (tuple(tensor.shape), tensor.dtype) != (leaf.aval.shape, leaf.aval.dtype):
            raise ArtifactTampered(f"{leaf.name} was read as {tuple(tensor.shape)} {tensor.dtype}; this rank needs {leaf.aval}")

    def _derive(self, waiting: dict[str, _Derived], host: list[torch.Tensor | None]) -> None:
        """Places the derived values whose parameters are all there, and frees parameters that no other one waits for."""
        ready = [key for key, derived in waiting.items() if all(host[source] is not None for source in derived.sources)]
        for derived in [waiting.pop(key) for key in ready]:
            self._place(derived.uses, self._executables[derived.uses[0].bucket].derive(derived.number, host))
        still = {source for derived in waiting.values() for source in derived.sources}
        for position, tensor in enumerate(host):
            if tensor is not None and position not in still:
                host[position] = None

    def _place(self, uses: Collection[_Use], tensor: torch.Tensor) -> None:
        if not uses:
            return
        memory = self._device.empty(tuple(tensor.shape), tensor.dtype)
        memory.copy_(tensor)
        # One tensor serves all buckets, so all of them must want the format.
        if all(use.position in self._executables[use.bucket].nz_operands for use in uses):
            memory = self._device.to_nz(memory)
        self._placed |= dict.fromkeys(uses, memory)
