"""tools/inspection/roofline.py: bytes of collectives, and estimates from a target's speeds."""

from __future__ import annotations

import pytest

from npucompile.graphs.errors import SpecError
from npucompile.graphs.types import Mesh
from npucompile.tools.builder.targets import target
from npucompile.tools.inspection.roofline import estimate, moved_bytes, nbytes, shape_of

COST = {"flops": 354 * 10**9, "read_bytes": 10**9, "write_bytes": 6 * 10**8}
GATHER = ("all_gather_into_tensor", "tp", "bf16[8,64]")


@pytest.mark.parametrize(
    ("name", "received"),
    [
        # Four ranks, a result of 1024 bytes: what a rank lacks of it, or what the other ranks hold for it.
        ("all_gather_into_tensor", 768),
        ("all_to_all_single", 768),
        ("broadcast", 768),
        ("reduce_scatter_tensor", 3072),
        ("all_reduce", 1536),
    ],
)
def test_each_collective_receives_its_share(name, received):
    assert moved_bytes([(name, "tp", "bf16[8,64]")], Mesh.parse("tp=4")) == {"tp": received}
    assert moved_bytes([(name, "tp", "bf16[8,64]")] * 2, Mesh.parse("dp=3,tp=4")) == {"tp": 2 * received}
    assert moved_bytes([(name, "tp", "bf16[8,64]")], Mesh.parse("dp=4")) == {"tp": 0}


def test_a_scatter_and_a_gather_are_one_all_reduce():
    mesh, stream = Mesh.parse("tp=4"), "bf16[8,64]"
    halves = moved_bytes([("reduce_scatter_tensor", "tp", "bf16[2,64]"), ("all_gather_into_tensor", "tp", stream)], mesh)
    assert halves == moved_bytes([("all_reduce", "tp", stream)], mesh)


def test_experts_get_a_row_for_each_token_and_choice():
    mesh = Mesh.parse("dp=2,tp=2")
    pair = [("moe_dispatch", "world", "i8[999,64]"), ("moe_combine", "world", "bf16[8,64]")]
    assert moved_bytes(pair, mesh, 3) == {"world": (8 * 3 * 64 * 1 + 8 * 3 * 64 * 2) * 3 // 4}
    assert moved_bytes([GATHER, *pair, GATHER], mesh, 3)["tp"] == 2 * 512


@pytest.mark.parametrize(("kind", "size"), [("bf16[8,64]", 1024), ("i32[4,4]", 64), ("f32[]", 4), ("bool[3]", 3)])
def test_types_have_sizes(kind, size):
    assert nbytes(kind) == size


@pytest.mark.parametrize("kind", ["bf16[?]", "bf17[2]", "bf16", ""])
def test_other_text_is_no_type(kind):
    with pytest.raises(SpecError, match="is no type of a value"):
        shape_of(kind)


def test_an_unknown_collective_is_refused():
    with pytest.raises(SpecError, match="all_guess is no collective"):
        moved_bytes([("all_guess", "tp", "f32[1]")], Mesh.parse("tp=2"))


def test_a_step_is_its_longer_side_and_then_its_links():
    a3 = target("ascend-a3")
    roof = estimate(COST, [("all_gather_into_tensor", "tp", "i8[392000000]")], Mesh.parse("tp=2"), a3)
    assert roof is not None
    assert (roof.arithmetic_s, roof.memory_s, roof.links_s) == pytest.approx((1e-3, 1e-3, 1e-3))
    assert roof.step_s == pytest.approx(2e-3)
    assert roof.as_dict() == {
        "target": "ascend-a3", "arithmetic_s": roof.arithmetic_s, "memory_s": roof.memory_s, "links_s": roof.links_s,
        "step_s": roof.step_s, "estimate": True,
    }  # fmt: skip
    quick = estimate(COST, [], Mesh.parse("tp=2"), a3, quantised=True)
    assert quick is not None
    assert (quick.arithmetic_s, quick.step_s) == pytest.approx((5e-4, 1e-3))


def test_groups_that_straddle_nodes_have_the_slower_link():
    a2, mesh = target("ascend-a2"), Mesh.parse("dp=2,tp=8")
    inside = estimate(COST, [("all_reduce", "tp", "bf16[1024]")], mesh, a2)
    across = estimate(COST, [("all_reduce", "dp", "bf16[1024]")], mesh, a2)
    assert inside is not None
    assert across is not None
    assert inside.links_s == pytest.approx(2 * 2048 * 7 / 8 / 196e9)
    assert across.links_s == pytest.approx(2048 / 25e9)


def test_one_device_needs_no_link_and_without_figures_there_is_no_estimate():
    roof = estimate({"flops": 354e12, "read_bytes": 1.6e12, "write_bytes": 0}, [], Mesh(), target("ascend-a3"))
    assert roof is not None
    assert (roof.arithmetic_s, roof.memory_s, roof.links_s) == pytest.approx((1, 1, 0))
    assert estimate(COST, [], Mesh(), target("cpu")) is None
