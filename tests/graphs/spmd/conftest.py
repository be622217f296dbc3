"""A mesh of devices that are not there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture
def group() -> Iterator[DeviceMesh]:
    """The device mesh of one dp group, as the partitioner builds it."""
    dist.init_process_group("fake", rank=0, world_size=6, store=FakeStore())
    yield init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))["tp"]
    dist.destroy_process_group()
