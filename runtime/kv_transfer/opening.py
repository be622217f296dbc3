"""Opens the pools of any executor for handovers."""

from __future__ import annotations

from ...lowering.device import NPU
from ..distributed.sharded_executor import ShardedExecutor
from ..executor import Executor
from .mooncake import Mooncake
from .pools import LocalPools, Pools
from .sharded_pools import ShardedPools


def protocol_of(device: str) -> str:
    """How bytes move to and from the memory of a kind of device."""
    return "ascend" if device == NPU else "tcp"


def open_pools(executor: Executor, host: str, protocol: str = "tcp") -> Pools:
    """Starts Mooncake over the pools of an executor, an engine for each rank in its process; called once all of it is loaded, by the thread
    that steps: on NPUs an engine belongs to the device of the thread that starts it.

    Args:
        host: address of this machine by which peers reach it.
        protocol: one of `mooncake.PROTOCOLS`.

    Raises:
        SpecError: there is no such protocol.
        LayoutError: there is a pool that no handover knows.
        TransferError: the engine cannot be used here, or refuses the memory, or those of another rank.
    """
    if isinstance(executor, ShardedExecutor):
        return ShardedPools(executor, Mooncake(host, protocol, executor.enter), host, protocol)
    return LocalPools(Mooncake(host, protocol, executor.enter), executor)
