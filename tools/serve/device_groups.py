"""Chooses what the ranks of a device communicate with: HCCL between NPUs, gloo between everything else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...lowering.ascend import hccl
from ...lowering.ascend.npu import NpuDevice
from ...runtime.distributed.process_groups import MakeGroup, gloo


def group_maker(device: Any, communicator_bytes: Mapping[str, int]) -> MakeGroup:
    """What `ProcessGroups` makes groups with.

    Args:
        device: of this rank, a `lowering.device.Device` that was opened; None is this machine's CPU.
        communicator_bytes: size of one buffer by symbol, as in the manifest.
    """
    if isinstance(device, NpuDevice):
        return hccl.group_maker(device.torch_npu, communicator_bytes)
    return gloo
