"""Opens the pools of any executor for handovers."""

from __future__ import annotations

from ..distributed.sharded_executor import ShardedExecutor
from ..executor import Executor
from .mooncake import Mooncake
from .pools import LocalPools, Pools
from .sharded_pools import ShardedPools


def open_pools(executor: Executor, host: str, protocol: str = "tcp") -> Pools:
    """Starts Mooncake over the pools of an executor, an engine for each rank in its process; called once all of it is loaded.

    Args:
        host: address of this machine by which peers reach it.
        protocol: one of `mooncake.PROTOCOLS`.

    Raises:
        SpecError: there is no such protocol.
        LayoutError: there is a pool that no handover knows.
        TransferError: the engine cannot be used here, or refuses the memory, or those of another rank.
    """
    if isinstance(executor, ShardedExecutor):
        return ShardedPools(executor, Mooncake(host, protocol), host, protocol)
    return LocalPools(Mooncake(host, protocol), executor.regions)
