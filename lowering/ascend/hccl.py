"""Process groups over HCCL, one for each group that GE graphs name, with communicators whose names are the same at every start.

Written against the sources of torch_npu (csrc/distributed/ProcessGroupHCCL.cpp of Ascend/pytorch, and the signatures of the installed
wheel); no communicator has been made (docs/on-hardware.md).
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup, Store

from ..device_error import named

MIB = 2**20

NAME_PREFIX = "group_name_"
"""What ProcessGroupHCCL puts before `Options.group_id` to name its communicator."""

MakeGroup = Callable[[str, tuple[int, ...], int, Store, str, float], ProcessGroup]


def group_maker(torch_npu: Any, buffer_bytes: Mapping[str, int]) -> MakeGroup:
    """What `ProcessGroups` (runtime/distributed/process_groups.py) takes to make HCCL groups.

    Args:
        torch_npu: the module, with CANN.
        buffer_bytes: size of one buffer of a communicator by symbol of its group; a communicator has two.
    """

    def make_group(name: str, ranks: tuple[int, ...], rank: int, store: Store, address: str, timeout_s: float) -> ProcessGroup:
        hccl = torch_npu._C._distributed_c10d.ProcessGroupHCCL
        group_rank, size = ranks.index(rank), len(ranks)
        with named(f"making HCCL's group {name}"):
            backend = hccl(store, group_rank, size, options(hccl, name, ranks, buffer_bytes.get(name), timeout_s))
        group = ProcessGroup(store, group_rank, size)
        group._register_backend(torch.device("npu"), ProcessGroup.BackendType.CUSTOM, backend)
        group._set_default_backend(ProcessGroup.BackendType.CUSTOM)
        return group

    return make_group


def options(hccl: Any, name: str, ranks: tuple[int, ...], buffer_bytes: int | None, timeout_s: float) -> Any:
    """Options of one group.

    Args:
        hccl: the class ProcessGroupHCCL.
        buffer_bytes: size of one buffer, rounded up to MiB; None leaves HCCL_BUFFSIZE.
    """
    chosen = hccl.Options()
    chosen._timeout = datetime.timedelta(seconds=timeout_s)
    # A compiled graph keeps the name of its communicator, so a start that finds it in GE's cache must make the same name again.
    chosen.group_id = f"npucompile_{name}_{ranks[0]}"
    # Empty would make it the default group, of which torch_npu expects one.
    chosen.global_ranks_in_group = list(ranks)
    # "group_name" is what HCCL's logs and profiles show; documented as at most 32 characters.
    config: dict[str, int | str] = {"group_name": f"{name}_{ranks[0]}"}
    if buffer_bytes is not None:
        config["hccl_buffer_size"] = -(-buffer_bytes // MIB)
    chosen.hccl_config = config
    return chosen
