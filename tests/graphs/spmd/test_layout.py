"""graphs/spmd/layout.py: `constrain` reduces exactly where it is written."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from npucompile.graphs.errors import PartitionError
from npucompile.graphs.spmd.layout import PartitionContext, constrain, is_dtensor, num_shards, partition_context, partitioning
from npucompile.graphs.spmd.placement import local_of
from npucompile.graphs.types import Mesh, Rules

RULES = Rules.of({"ffn": "tp", "heads": "tp", "experts": ("dp", "tp")})
MESH = Mesh.parse("dp=3,tp=2")


def at(group: DeviceMesh, rules: Rules = RULES, dp: int = 0, tp: int = 0) -> PartitionContext:
    return PartitionContext(rules, MESH, group, torch.tensor([dp, tp], dtype=torch.int32))


def test_ways_counts_the_shards_of_an_axis(group: DeviceMesh) -> None:
    assert [num_shards(axis) for axis in ("ffn", "experts", "vocab")] == [1, 1, 1], "outside partitioning there is one device"
    with partitioning(at(group)):
        assert [num_shards(axis) for axis in ("ffn", "experts", "vocab")] == [2, 6, 1]
    assert partition_context() is None


def test_constrain_outside_partitioning_is_the_value_itself(group: DeviceMesh) -> None:
    x = torch.ones(2, 4)
    sharded = DTensor.from_local(x, group, [Shard(1)], run_check=False)
    assert constrain(x, None, "ffn") is x
    assert constrain(sharded, None, None) is sharded
    with partitioning(at(group)):
        assert constrain(x, None, "ffn") is x
        assert constrain(sharded, None, None) is not sharded
    assert constrain(sharded, None, None) is sharded


def test_constrain_lays_out_by_the_rules(group: DeviceMesh) -> None:
    partial = DTensor.from_local(torch.ones(2, 4), group, [Partial()], run_check=False)
    with partitioning(at(group)):
        assert constrain(partial, None, None).placements == (Replicate(),)
        assert constrain(partial, None, "ffn").placements == (Shard(1),)
        with partitioning(at(group, Rules())):
            assert constrain(partial, None, "ffn").placements == (Replicate(),)
        assert constrain(partial, None, "ffn").placements == (Shard(1),)


@pytest.mark.parametrize("tp", [0, 1])
def test_a_share_of_a_whole_value_is_taken_at_the_coordinates(group: DeviceMesh, tp: int) -> None:
    """The position comes from the coordinates, not from the rank of this process, which is 0."""
    x = torch.arange(12.0).view(2, 6)
    whole = DTensor.from_local(x, group, [Replicate()], run_check=False)
    with partitioning(at(group, dp=2, tp=tp)):
        for axes, dim in (((None, "ffn"), 1), (("ffn", None), 0)):
            share = constrain(whole, *axes)
            assert share.placements == (Shard(dim),)
            assert share.shape == x.shape
            assert torch.equal(local_of(share), x.chunk(2, dim)[tp])


def test_constrain_names_every_dimension() -> None:
    with pytest.raises(PartitionError, match=r"2 axis names \(None, 'ffn'\) for a value of shape \(2, 3, 4\)"):
        constrain(torch.ones(2, 3, 4), None, "ffn")


def test_constrain_refuses_a_size_that_does_not_divide(group: DeviceMesh) -> None:
    whole = DTensor.from_local(torch.ones(2, 5), group, [Replicate()], run_check=False)
    with partitioning(at(group)), pytest.raises(PartitionError, match=r"axis 'ffn' of size 5 does not divide by 2 \(mesh dp=3,tp=2\)"):
        constrain(whole, None, "ffn")


def test_models_are_read_without_what_partitions_them() -> None:
    """DTensor takes longer to import than torch; a plan or a program on one device needs none of it."""
    code = """
import sys, torch
from npucompile.graphs.spmd.layout import is_dtensor
from npucompile.models import programs, registry
registry.find("qwen3.5-tiny")
sys.exit("torch.distributed.tensor" in sys.modules or is_dtensor(torch.ones(1)))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_dtensor_is_known(group: DeviceMesh) -> None:
    assert is_dtensor(DTensor.from_local(torch.ones(2), group, [Replicate()], run_check=False))
    assert not is_dtensor(torch.ones(2))
    assert not is_dtensor(None)
