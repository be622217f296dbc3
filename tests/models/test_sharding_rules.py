"""models/sharding_rules.py: the mesh axes of each logical axis, for dense models, spread experts and split experts."""

from __future__ import annotations

import pytest
import torch
from support import fleets

from npucompile.graphs import tree
from npucompile.graphs.errors import PartitionError
from npucompile.graphs.types import Aval, Mesh
from npucompile.models.sharding_rules import rules
from npucompile.models.variant import PLAIN, Variant

HEADS = {axis: ("tp",) for axis in ("q_heads", "kv_heads", "delta_heads", "ffn", "vocab", "sampled_rows")}
SPREAD = {"experts": ("dp", "tp")}
STREAM = {"tokens": ("tp",), "expert_tokens": ("tp",)}
SPLIT = {"expert_ffn": ("tp",), "shared_ffn": ("tp",)}


@pytest.mark.parametrize(
    ("mesh", "options", "table"),
    [
        ("tp=4", {}, HEADS | SPLIT),
        ("tp=4", {"tokens": 64}, HEADS | SPLIT),
        ("tp=4", {"experts": 8}, HEADS | SPREAD),
        ("tp=4", {"experts": 8, "tokens": 3}, HEADS | SPREAD),
        ("tp=4", {"experts": 8, "tokens": 4}, HEADS | SPREAD | STREAM),
        ("dp=2,tp=2", {"experts": 8, "tokens": 3}, HEADS | SPREAD | STREAM),
        ("dp=4", {"experts": 8, "tokens": 1}, HEADS | SPREAD | STREAM),
        ("tp=4", {"experts": 8, "expert_parallel": False, "tokens": 64}, HEADS | SPLIT),
        ("", {"experts": 7}, HEADS | SPLIT),
    ],
    ids=str,
)
def test_mesh_axes_of_each_layout(mesh: str, options: dict[str, int], table: dict[str, tuple[str, ...]]) -> None:
    assert dict(rules(Mesh.parse(mesh), **options).table) == table


@pytest.mark.parametrize("mesh", ["dp=3", "dp=4,tp=4", "tp=16"])
def test_experts_that_do_not_spread_evenly_are_refused(mesh: str) -> None:
    size = Mesh.parse(mesh).size
    with pytest.raises(PartitionError, match=f"8 experts over the {size} devices of mesh {mesh}: .* legal are meshes whose size divides 8"):
        rules(Mesh.parse(mesh), experts=8)
    assert rules(Mesh.parse(mesh), experts=8, expert_parallel=False)


def total(avals: list[Aval], mesh: Mesh, expert_parallel: bool) -> int:
    layout = rules(mesh, experts=8, expert_parallel=expert_parallel)
    return sum(layout.local_aval(aval, mesh).nbytes for aval in avals)


@pytest.mark.parametrize(("variant", "expert_parallel"), [(Variant(grouped=True), True), (PLAIN, False)])
def test_everything_large_is_split(variant: Variant, expert_parallel: bool) -> None:
    """Each of two devices has a half of all but norms, routers, request slots, and the shared expert of spread experts."""
    named = tree.flatten(fleets.model(variant).params(torch.float32))
    avals = [param.aval for _, param in named]
    whole = total(avals, Mesh(), expert_parallel)
    half = total(avals, Mesh.parse("tp=2"), expert_parallel)
    replicated = sum(p.aval.nbytes for name, p in named if "norm" in name or "router" in name or "shared_gate." in f"{name}.")
    if expert_parallel:
        replicated += sum(p.aval.nbytes for name, p in named if "shared_gate_up" in name or "shared_down" in name)
    assert half - replicated == (whole - replicated) // 2
    pools = [aval for name, aval in tree.flatten(fleets.model(variant).state(fleets.LIMITS, torch.float32)) if name != "request_slots"]
    assert total(pools, Mesh.parse("tp=2"), expert_parallel) == total(pools, Mesh(), expert_parallel) // 2


def test_groups_have_the_same_parameters_except_experts() -> None:
    mesh, layout = Mesh.parse("dp=4"), rules(Mesh.parse("dp=4"), experts=8)
    for name, param in tree.flatten(fleets.model(Variant(grouped=True)).params(torch.float32)):
        parts = 4 if "experts" in param.aval.axes else 1
        assert layout.local_aval(param.aval, mesh).nbytes * parts == param.aval.nbytes, name
