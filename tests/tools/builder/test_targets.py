"""tools/builder/targets.py: the targets, and the meshes they refuse."""

from __future__ import annotations

import os

import pytest

from npucompile.graphs.errors import SpecError
from npucompile.graphs.types import Mesh
from npucompile.lowering.artifact.fixed_cost import FLOPS_PER_BYTE
from npucompile.lowering.machines import GIB
from npucompile.tools.builder.targets import TARGETS, check_mesh, target


def test_several_ranks_of_this_machine_run_uncompiled():
    one, two = Mesh(), Mesh.parse("tp=2")
    assert [target(name).default_backend(one) for name in TARGETS] == ["inductor", "ge", "ge"]
    assert [target(name).default_backend(two) for name in TARGETS] == ["eager", "ge", "ge"]


def test_an_unknown_name_is_answered_with_the_legal_ones():
    with pytest.raises(SpecError, match=r"'ascend_a3' is not known \(did you mean ascend-a3\?\); legal are cpu, ascend-a3, ascend-a2"):
        target("ascend_a3")


def test_a_die_of_a3_has_64_gib_of_which_torch_npu_offers_60_96():
    a3, mesh = target("ascend-a3"), Mesh.parse("dp=8,tp=2")
    assert a3.memory_bytes(mesh) == 64 * GIB
    assert (a3.memory_bytes(mesh) - a3.reserved_bytes(mesh)) / GIB == pytest.approx(60.96)
    assert (a3.page_size, a3.npus_per_node, a3.max_npus) == (128, 16, 768)


def test_speeds_are_known_for_npus_and_roce_is_the_slow_link():
    a3, a2 = target("ascend-a3").npu, target("ascend-a2").npu
    assert (a3.hbm_bytes_per_s, a3.bf16_ops_per_s, a3.int8_ops_per_s) == (1.6e12, 354e12, 708e12)
    assert a3.link_bytes_per_s == a3.node_link_bytes_per_s == a2.link_bytes_per_s == 196e9
    assert a2.node_link_bytes_per_s == 25e9
    assert target("cpu").npu is None


def test_the_price_of_a_step_is_by_the_same_speeds():
    kinds = [target("ascend-a3"), target("ascend-a2")]
    assert {kind.chip: round(kind.npu.bf16_ops_per_s / kind.npu.hbm_bytes_per_s) for kind in kinds} == FLOPS_PER_BYTE


def test_ranks_on_a_cpu_share_its_memory():
    cpu, memory = target("cpu"), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert cpu.memory_bytes(Mesh()) == memory
    assert cpu.memory_bytes(Mesh.parse("dp=2,tp=2")) == memory // 4
    assert cpu.reserved_bytes(Mesh.parse("dp=2,tp=2")) == 0


@pytest.mark.parametrize(
    ("name", "mesh", "nodes"),
    [
        ("ascend-a3", "dp=8,tp=2", 1),
        ("ascend-a3", "dp=16,tp=2", 2),
        ("ascend-a2", "dp=2,tp=8", 2),
        ("ascend-a3", "", 1),
        ("cpu", "tp=3", 1),
        ("ascend-a3", "dp=5,tp=3", 1),  # a group smaller than a node need not divide it
    ],
)
def test_counts_nodes(name, mesh, nodes):
    check_mesh(target(name), Mesh.parse(mesh))
    assert target(name).nodes(Mesh.parse(mesh)) == nodes


@pytest.mark.parametrize(
    ("name", "mesh", "message"),
    [
        ("ascend-a3", "dp=8,ep=2", r"unknown axis 'ep'; legal are dp and tp"),
        ("ascend-a3", "pp=2,ep=2", r"unknown axis 'pp', 'ep'; legal are dp and tp"),
        ("ascend-a3", "tp=2,dp=8", r"axes are tp,dp; legal is each of dp,tp at most once, in this order"),
        ("ascend-a3", "dp=49,tp=16", r"has 784 ranks and ascend-a3 at most 768"),
        ("ascend-a2", "dp=9,tp=8", r"has 72 ranks and ascend-a2 at most 64"),
        ("cpu", "dp=65", r"has 65 ranks and cpu at most 64"),
        ("ascend-a2", "dp=2,tp=16", r"tp is 16 and a node of ascend-a2 has 8 NPUs; legal is tp up to 8"),
        ("ascend-a3", "dp=6,tp=3", r"groups of tp=3 straddle nodes of 16 NPUs"),
        ("ascend-a3", "dp=1,tp=24", r"groups of tp=24 straddle nodes"),
    ],
)
def test_refuses_a_mesh_by_name(name, mesh, message):
    with pytest.raises(SpecError, match=message):
        check_mesh(target(name), Mesh.parse(mesh))
