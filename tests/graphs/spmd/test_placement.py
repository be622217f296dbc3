"""graphs/spmd/placement.py: logical axes become placements of DTensors, which are put together from what devices hold."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from npucompile.graphs.errors import PartitionError
from npucompile.graphs.spmd.placement import assembled, local_of, placements
from npucompile.graphs.types import Rules

RULES = Rules.of({"ffn": "tp", "heads": "tp", "experts": ("dp", "tp")})


def test_one_placement_a_mesh_axis(group: DeviceMesh) -> None:
    assert placements((None, "ffn"), group, RULES) == [Shard(1)]
    assert placements(("experts", None), group, RULES) == [Shard(0)], "dp is not an axis of DTensor's mesh"
    assert placements(("vocab", None), group, RULES) == [Replicate()]
    with pytest.raises(PartitionError, match=r"axes \['heads', 'ffn'\] of one value both map to mesh axis 'tp'"):
        placements(("heads", "ffn"), group, RULES)


def test_what_is_assembled_is_what_devices_hold(group: DeviceMesh) -> None:
    local = torch.ones(2, 3, 5)
    for layout, shape in ((Shard(1), (2, 6, 5)), (Replicate(), (2, 3, 5)), (Partial(), (2, 3, 5))):
        value = assembled(local, group, [layout])
        assert (tuple(value.shape), value.placements) == (shape, (layout,))
        assert value.stride() == (shape[1] * 5, 5, 1)
        assert local_of(value) is local
    assert local_of(local) is local
