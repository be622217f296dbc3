"""The process groups that graphs name: one per mesh axis, and "world".

A graph's collectives name their group "tp", "dp" or "world"; the ranks of that group differ from rank to rank. This module registers
gloo groups of this process under these names. `torch.distributed` itself is not initialised.
"""

from __future__ import annotations

import datetime
from types import TracebackType

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

from ...graphs.types import Mesh
from .control_plane import RankError


class ProcessGroups:
    """Gloo groups registered under their names in this process until `close`; one set at a time.

    Args:
        mesh: of all ranks; every rank creates its groups at the same time.
        store: shared by all ranks, used by nothing else.
        address: of this machine, as the other ranks reach it.
        timeout_s: how long a collective waits for the slowest rank.

    Raises:
        RankError: when the ranks of a group do not connect.
    """

    def __init__(self, mesh: Mesh, rank: int, store: Store, address: str, timeout_s: float) -> None:
        # The registry of torch holds weak references.
        self._groups: dict[str, ProcessGroup] = {}
        for name in mesh.groups():
            ranks = mesh.group(name, rank)
            try:
                group = _gloo(name, ranks, rank, store, address, timeout_s)
            except RuntimeError as error:
                self.close()
                raise RankError(f"rank {rank} cannot connect to ranks {list(ranks)} of its group {name!r}: {error}") from None
            _register_process_group(GroupName(name), group)
            self._groups[name] = group

    def __enter__(self) -> ProcessGroups:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Unregisters the names and closes the connections."""
        for name in self._groups:
            _unregister_process_group(GroupName(name))
        self._groups = {}


def _gloo(name: str, ranks: tuple[int, ...], rank: int, store: Store, address: str, timeout_s: float) -> ProcessGroup:
    prefixed = PrefixStore(f"{name}/{ranks[0]}", store)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in torch's stub
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = datetime.timedelta(seconds=timeout_s)
    group_rank = ranks.index(rank)
    gloo = ProcessGroupGloo(prefixed, group_rank, len(ranks), options)
    group = ProcessGroup(prefixed, group_rank, len(ranks))
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    group._set_group_name(GroupName(name))
    return group
