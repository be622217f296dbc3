"""Logical axes become placements, and constrain reduces exactly where it stands."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from npucompile.graphs.errors import PartitionError
from npucompile.graphs.layout import constrain, partitioning, placements
from npucompile.graphs.types import Rules

RULES = Rules.of({"ffn": "tp", "heads": "tp", "experts": ("dp", "tp")})


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


def test_one_placement_a_mesh_axis(mesh: DeviceMesh) -> None:
    assert placements((None, "ffn"), mesh, RULES) == [Replicate(), Shard(1)]
    assert placements(("experts", None), mesh, RULES) == [Shard(0), Shard(0)]
    assert placements(("vocab", None), mesh, RULES) == [Replicate(), Replicate()]
    with pytest.raises(PartitionError, match=r"axes \['heads', 'ffn'\] of one value both map to mesh axis 'tp'"):
        placements(("heads", "ffn"), mesh, RULES)


def test_constrain_outside_partitioning_is_the_value_itself(mesh: DeviceMesh) -> None:
    x = torch.ones(2, 4)
    sharded = DTensor.from_local(x, mesh, [Replicate(), Shard(1)], run_check=False)
    assert constrain(x, None, "ffn") is x
    assert constrain(sharded, None, None) is sharded
    with partitioning(RULES):
        assert constrain(x, None, "ffn") is x
        assert constrain(sharded, None, None) is not sharded
    assert constrain(sharded, None, None) is sharded


def test_constrain_lays_out_by_the_rules(mesh: DeviceMesh) -> None:
    partial = DTensor.from_local(torch.ones(2, 4), mesh, [Replicate(), Partial()], run_check=False)
    with partitioning(RULES):
        assert constrain(partial, None, None).placements == (Replicate(), Replicate())
        assert constrain(partial, None, "ffn").placements == (Replicate(), Shard(1))
        with partitioning(Rules()):
            assert constrain(partial, None, "ffn").placements == (Replicate(), Replicate())
        assert constrain(partial, None, "ffn").placements == (Replicate(), Shard(1))


def test_constrain_names_every_dimension() -> None:
    with pytest.raises(PartitionError, match=r"2 axis names \(None, 'ffn'\) for a value of shape \(2, 3, 4\)"):
        constrain(torch.ones(2, 3, 4), None, "ffn")
