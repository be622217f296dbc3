"""The process groups that graphs name: one per mesh axis, "world", and what else a device wants.

A graph's collectives name their group by a symbol such as "tp"; the ranks of that group differ from rank to rank. This module makes the
groups of one rank and registers them under these names. `torch.distributed` itself is not initialised.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType, TracebackType

import torch
from torch._C._distributed_c10d import (
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    Store,
    _register_process_group,
    _unregister_process_group,
)
from torch.distributed.distributed_c10d import GroupName

from ...graphs.types import DISPATCH, FUSED_EXPERTS, Mesh
from .control_plane import RankError

MakeGroup = Callable[[str, tuple[int, ...], int, Store, str, float], ProcessGroup]
"""Makes one process group; all its ranks call it at the same time. Raises RuntimeError where they do not connect. Its arguments:

- name: symbol of the group; with the first of the ranks it is unique among the groups of a mesh.
- ranks: of the group, as numbers among all ranks.
- rank: number of this process among all; one of `ranks`.
- store: shared by these ranks, used by nothing else.
- address: of this machine, as the other ranks reach it.
- timeout_s: how long a collective waits for the slowest rank.
"""


def gloo(name: str, ranks: tuple[int, ...], rank: int, store: Store, address: str, timeout_s: float) -> ProcessGroup:
    """A gloo group, for tensors on the CPU."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in torch's stub
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = datetime.timedelta(seconds=timeout_s)
    group_rank = ranks.index(rank)
    backend = ProcessGroupGloo(store, group_rank, len(ranks), options)
    group = ProcessGroup(store, group_rank, len(ranks))
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    return group


class ProcessGroups:
    """The groups of one rank, registered under their names in this process until `close`; one set at a time.

    Symbols with the same ranks share a group: where dp is 1, "tp" is "world". "dispatch" never shares one.

    Args:
        mesh: of all ranks; every rank creates its groups at the same time.
        store: shared by all ranks, used by nothing else.
        address: of this machine, as the other ranks reach it.
        timeout_s: how long a collective waits for the slowest rank.
        symbols: groups to make, the same on all ranks; None makes one per axis of the mesh and "world".
        make_group: makes one group, of the kind that the device communicates with.

    Attributes:
        groups: process group by symbol; empty after `close`.

    Raises:
        RankError: when the ranks of a group do not connect.
    """

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        store: Store,
        address: str,
        timeout_s: float,
        *,
        symbols: Collection[str] | None = None,
        make_group: MakeGroup = gloo,
    ) -> None:
        # The registry of torch holds weak references.
        self._groups: dict[str, ProcessGroup] = {}
        by_ranks: dict[tuple[str, tuple[int, ...]], ProcessGroup] = {}
        # In one order on all ranks: making a group waits for its other ranks.
        for name in sorted(mesh.groups() if symbols is None else symbols):
            ranks = mesh.group(name, rank)
            key = (name if name in (DISPATCH, FUSED_EXPERTS) else "", ranks)
            if key not in by_ranks:
                try:
                    by_ranks[key] = make_group(name, ranks, rank, PrefixStore(f"{name}/{ranks[0]}", store), address, timeout_s)
                except RuntimeError as error:
                    self.close()
                    raise RankError(f"rank {rank} cannot connect to ranks {list(ranks)} of its group {name!r}: {error}") from None
                by_ranks[key]._set_group_name(GroupName(name))
            _register_process_group(GroupName(name), by_ranks[key])
            self._groups[name] = by_ranks[key]

    @property
    def groups(self) -> Mapping[str, ProcessGroup]:
        return MappingProxyType(self._groups)

    def __enter__(self) -> ProcessGroups:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Unregisters the names and closes the connections."""
        for name in self._groups:
            _unregister_process_group(GroupName(name))
        self._groups = {}
