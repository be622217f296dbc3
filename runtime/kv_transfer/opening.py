"""Opens the pools of any executor for handovers."""

from __future__ import annotations

from ...graphs.errors import SpecError
from ..distributed.sharded_executor import ShardedExecutor
from ..executor import Executor
from .mooncake import Mooncake
from .pools import LocalPools, Pools


def open_pools(executor: Executor, host: str, protocol: str = "tcp") -> Pools:
    """Starts Mooncake over the pools of an executor; called once it is loaded.

    Args:
        host: address of this machine by which peers reach it.
        protocol: one of `mooncake.PROTOCOLS`.

    Raises:
        SpecError: there is no such protocol, or the executor has several ranks.
        LayoutError: there is a pool that no handover knows.
        TransferError: the engine cannot be used here, or refuses the memory.
    """
    if isinstance(executor, ShardedExecutor):
        raise SpecError(f"mesh {executor.control_plane.mesh} has {executor.control_plane.mesh.size} ranks; a handover knows one")
    return LocalPools(Mooncake(host, protocol), executor.regions)
