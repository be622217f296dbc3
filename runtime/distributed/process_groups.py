"""Turns the ranks of a job into the process groups that graphs name: one per mesh axis, and "world".

A graph's collectives name their group "tp", "dp" or "world"; which ranks that is differs from rank to rank and is bound here, in
this process, to gloo groups. No process group of torch's own is initialised.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
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


class Groups:
    """Gloo groups bound to their names in this process, until `close`; one set at a time.

    Args:
        mesh: of all ranks; every rank makes its groups at the same time.
        store: shared by all ranks, used by nothing else.
        address: of this machine, as the other ranks reach it.
        timeout_s: how long a collective waits for the slowest rank.

    Raises:
        RankError: when the ranks of a group do not connect.
    """

    def __init__(self, mesh: Mesh, rank: int, store: Store, address: str, timeout_s: float) -> None:
        self._bound: Mapping[str, ProcessGroup] = {}
        bound: dict[str, ProcessGroup] = {}
        self._bound = bound
        for name in mesh.groups():
            ranks = mesh.group(name, rank)
            try:
                group = _gloo(name, ranks, rank, store, address, timeout_s)
            except RuntimeError as error:
                self.close()
                raise RankError(f"rank {rank} cannot connect to ranks {list(ranks)} of its group {name!r}: {error}") from None
            _register_process_group(GroupName(name), group)
            bound[name] = group

    def __enter__(self) -> Groups:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Frees the names and the connections."""
        for name in self._bound:
            _unregister_process_group(GroupName(name))
        self._bound = {}


def _gloo(name: str, ranks: tuple[int, ...], rank: int, store: Store, address: str, timeout_s: float) -> ProcessGroup:
    own = PrefixStore(f"{name}/{ranks[0]}", store)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # its stub has not got it
    options._devices = [ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = datetime.timedelta(seconds=timeout_s)
    place = ranks.index(rank)
    gloo = ProcessGroupGloo(own, place, len(ranks), options)
    group = ProcessGroup(own, place, len(ranks))
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    group._set_group_name(GroupName(name))
    return group
