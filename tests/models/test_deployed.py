"""models/deployed.py: a deployment's variant follows from its formats, its mesh and what its devices run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from npucompile.graphs.types import Mesh
from npucompile.models import registry, sharding_rules
from npucompile.models.deployed import deployed
from npucompile.models.quant.recipes import formats_of_scheme

MOE, DENSE = "qwen3.5-397b", "qwen3.5-27b"


@dataclass(frozen=True)
class Machine:
    chip: str = "ascend910_93"
    packages: tuple[str, ...] = field(default=())
    serial: bool = False


def variant_of(model: str, scheme: str, mesh: str, *, backend: str = "ge", packages: tuple[str, ...] = (), dispatches: bool = True) -> Any:
    config, at = registry.find(model).model.config, Mesh.parse(mesh)
    rules = sharding_rules.rules(at, experts=config.num_experts, tokens=at.axis("tp"))
    machine = Machine(packages=packages)
    options: dict[str, Any] = {"recurrent": torch.bfloat16, "dispatches": dispatches, "local": False, "backend": backend}
    return deployed(config, formats_of_scheme(scheme, model), at, rules, platform=machine, **options)


@pytest.mark.parametrize(("mesh", "copies", "grouped"), [("1", 1, False), ("tp=2", 1, True), ("dp=8,tp=2", 1, True), ("tp=16", 8, True)])
def test_heads_are_copied_and_experts_grouped_where_the_mesh_asks_for_it(mesh: str, copies: int, grouped: bool) -> None:
    variant = variant_of(MOE, "none", mesh)
    assert (variant.kv_repeat, variant.grouped, variant.shards) == (copies, grouped, ())
    assert not variant_of(DENSE, "none", "tp=2").grouped


def test_parts_of_a_contraction_are_those_of_the_layout() -> None:
    """With spread experts a shared expert is whole on every device."""
    variant = variant_of(MOE, "w8a8", "dp=2,tp=4")
    assert {axis: variant.parts(axis) for axis in ("q_heads", "delta_heads", "ffn", "shared_ffn", "expert_ffn", None)} == {
        "q_heads": 4, "delta_heads": 4, "ffn": 4, "shared_ffn": 1, "expert_ffn": 1, None: 1,
    }  # fmt: skip


def test_tokens_are_dispatched_where_that_moves_fewer_bytes() -> None:
    assert variant_of(MOE, "w4a8", "dp=8,tp=2").dispatches_in_parts
    assert not variant_of(MOE, "w4a8", "dp=2,tp=2").dispatches_in_parts
    assert variant_of(MOE, "w4a8", "dp=8,tp=2", dispatches=False).most_dispatched == 0


def test_operators_of_packages_fuse_int4_experts_alone() -> None:
    for scheme, backend, packages, fused in (
        ("w4a8", "aclgraph", ("vllm-ascend",), True),
        ("w8a8", "aclgraph", ("vllm-ascend",), False),
        ("w4a8", "ge", ("vllm-ascend",), False),
        ("w4a8", "aclgraph", (), False),
    ):
        assert variant_of(MOE, scheme, "dp=8,tp=2", backend=backend, packages=packages).fused_experts == fused
