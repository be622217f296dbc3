"""graphs/types.py: bad values of the basic types are refused with an error that contains them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs.errors import PartitionError, SpecError
from npucompile.graphs.types import Aval, Bucket, Limits, Mesh, Rules

F32 = torch.float32


# --- Aval ---


def test_aval_names_every_axis_or_none() -> None:
    assert Aval((2, 3), F32).axes == (None, None)
    assert Aval((2, 3), F32, ("ffn", None)).axes == ("ffn", None)
    assert Aval((), F32).axes == ()
    with pytest.raises(SpecError, match=r"1 axis names \('ffn',\) for 2 dimensions \(2, 3\)"):
        Aval((2, 3), F32, ("ffn",))


@pytest.mark.parametrize(
    ("aval", "text", "nbytes"),
    [
        (Aval((4, 64), torch.bfloat16), "bf16[4,64]", 512),
        (Aval((), torch.int32), "i32[]", 4),
        (Aval((3, 0), torch.bool), "bool[3,0]", 0),
        (Aval((2,), torch.float64), "torch.float64[2]", 16),
    ],
)
def test_aval_prints_and_weighs(aval: Aval, text: str, nbytes: int) -> None:
    assert str(aval) == text
    assert aval.nbytes == nbytes


# --- Mesh ---

AXES = st.lists(st.tuples(st.from_regex(r"[a-z_][a-z0-9_]{0,3}", fullmatch=True), st.integers(1, 999)), unique_by=lambda axis: axis[0])


@given(AXES)
def test_mesh_reads_what_it_prints(axes: list[tuple[str, int]]) -> None:
    mesh = Mesh(tuple(axes))
    assert Mesh.parse(str(mesh)) == mesh
    assert Mesh.parse(", ".join(f"{name}={size}" for name, size in axes)) == mesh


def test_mesh_of_one_device() -> None:
    for text in ("", "  ", "1"):
        mesh = Mesh.parse(text)
        assert (mesh, mesh.size, mesh.axis("tp"), str(mesh)) == (Mesh(), 1, 1, "1")


@pytest.mark.parametrize("part", ["dp", "dp=", "=2", "dp=0", "dp=-1", "dp=two", "dp=2.0", "2=dp", "d p=2", "dp=2=3", "dp=²", "dp=٢", ""])
@pytest.mark.parametrize("before", [True, False])
def test_mesh_refuses_anything_else(part: str, before: bool) -> None:
    text = f"{part},tp=2" if before else f"tp=2,{part}"
    with pytest.raises(SpecError) as caught:
        Mesh.parse(text)
    assert repr(text) in str(caught.value)
    assert repr(part) in str(caught.value)
    assert "dp=8,tp=2" in str(caught.value)


def test_mesh_refuses_an_axis_twice() -> None:
    with pytest.raises(SpecError, match="'tp' is given twice"):
        Mesh.parse("tp=2,dp=4,tp=2")


def test_coordinates_are_row_major_whatever_the_order_of_the_axes() -> None:
    mesh = Mesh.parse("dp=2,tp=3")
    assert [tuple(mesh.coordinates(rank).values()) for rank in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert mesh.coords(4).tolist() == [1, 1]
    assert mesh.coords(4).dtype == torch.int32
    assert Mesh().coordinates(0) == {"dp": 0, "tp": 0}
    assert Mesh.parse("tp=3,dp=2").coordinates(4) == {"dp": 1, "tp": 1}
    for rank in (-1, 6):
        with pytest.raises(SpecError, match=f"rank {rank} of mesh dp=2,tp=3; legal is 0 to 5"):
            mesh.coordinates(rank)


def test_groups_by_hand() -> None:
    assert Mesh.parse("dp=2,tp=3").groups() == {
        "dp": ((0, 3), (1, 4), (2, 5)),
        "tp": ((0, 1, 2), (3, 4, 5)),
        "world": ((0, 1, 2, 3, 4, 5),),
    }
    assert Mesh.parse("tp=2").groups() == {"dp": ((0,), (1,)), "tp": ((0, 1),), "world": ((0, 1),)}
    assert Mesh.parse("x=2").groups() == {"dp": ((0,), (1,)), "tp": ((0,), (1,)), "axis:x": ((0, 1),), "world": ((0, 1),)}
    assert Mesh().groups() == {"dp": ((0,),), "tp": ((0,),), "world": ((0,),)}
    # Expert dispatch may have a group of its own, whose ranks are all ranks.
    assert Mesh.parse("dp=2,tp=2").groups(["tp", "dispatch"]) == {"tp": ((0, 1), (2, 3)), "dispatch": ((0, 1, 2, 3),)}


@pytest.mark.parametrize("text", ["dp=2,tp=2", "tp=4", "dp=3,tp=2", "tp=3,dp=2", "dp=2,pp=3,tp=2", ""])
def test_a_group_is_the_ranks_that_differ_on_its_axis_alone(text: str) -> None:
    mesh = Mesh.parse(text)
    for name, groups in mesh.groups().items():
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
        for group in groups:
            assert all(mesh.group(name, rank) == group for rank in group)
            if name != "world":
                along = name.removeprefix("axis:")
                assert [mesh.coordinates(rank)[along] for rank in group] == list(range(mesh.axis(along)))
                others = [{axis: at for axis, at in mesh.coordinates(rank).items() if axis != along} for rank in group]
                assert others == [others[0]] * len(group)


# --- Rules ---

MESH = Mesh.parse("dp=4,tp=2")
RULES = Rules.of({"experts": ("dp", "tp"), "ffn": "tp", "heads": "tp"})


def test_rules_are_the_same_in_any_order() -> None:
    assert Rules.of({"heads": "tp", "ffn": ("tp",), "experts": ("dp", "tp")}) == RULES
    assert [RULES.mesh_axes(name) for name in ("experts", "ffn", "vocab", None)] == [("dp", "tp"), ("tp",), (), ()]


def test_rules_refuse_what_does_not_divide() -> None:
    with pytest.raises(PartitionError, match=r"params.w: axis 'experts' of size 12 does not divide by 8 .*'dp', 'tp'.* of mesh dp=4,tp=2"):
        RULES.check(Aval((12, 3), F32, ("experts", None)), MESH, "params.w")


def test_rules_refuse_two_axes_on_one_mesh_axis() -> None:
    with pytest.raises(PartitionError, match=r"params\.w: axes 'heads' and 'ffn' both map to mesh axis 'tp'"):
        RULES.check(Aval((4, 4), F32, ("heads", "ffn")), MESH, "params.w")


TURNED = Rules.of({"heads": "tp", "experts": ("dp", "tp"), "turned": ("tp", "dp"), "absent": "sp"})


def test_a_slice_by_hand() -> None:
    mesh = Mesh.parse("dp=2,tp=3")
    aval = Aval((12, 5, 6), F32, ("experts", None, None))
    assert TURNED.local_aval(aval, mesh) == Aval((2, 5, 6), F32, aval.axes)
    assert TURNED.local_slice(aval, mesh, 4) == (slice(8, 10), slice(0, 5), slice(0, 6))
    assert TURNED.local_slice(Aval((12,), F32, ("turned",)), mesh, 4) == (slice(6, 8),)
    assert TURNED.local_slice(Aval((12, 6), F32, (None, "heads")), mesh, 4) == (slice(0, 12), slice(2, 4))
    assert TURNED.local_slice(Aval((4,), F32, ("absent",)), mesh, 4) == (slice(0, 4),)
    assert TURNED.local_slice(Aval((), F32), mesh, 5) == ()


@given(
    st.lists(st.sampled_from([None, "heads", "experts", "turned", "other"]), max_size=3),
    st.sampled_from(["dp=2,tp=3", "tp=6", "dp=3,tp=1", ""]),
)
def test_slices_of_all_ranks_cover_a_value_evenly(axes: list[str | None], text: str) -> None:
    if sum(axis in ("heads", "experts", "turned") for axis in axes) > 1:
        return
    mesh = Mesh.parse(text)
    aval = Aval(tuple(6 * (i + 1) for i in range(len(axes))), F32, tuple(axes))
    copies = torch.zeros(aval.shape)
    for rank in range(mesh.size):
        part = copies[TURNED.local_slice(aval, mesh, rank)]
        assert tuple(part.shape) == TURNED.local_aval(aval, mesh).shape
        part += 1
    shards = math.prod(mesh.axis(name) for axis in axes for name in TURNED.mesh_axes(axis))
    assert (copies == mesh.size / shards).all()


# --- Bucket, Limits, Signature ---


@pytest.mark.parametrize("sizes", [("verify", 1, 1), ("decode", 0, 1), ("prefill", 1, 0), ("decode", -1, 1)])
def test_bucket_refuses(sizes: tuple[str, int, int]) -> None:
    with pytest.raises(SpecError, match=r"/".join(map(str, sizes)) + r": kind is one of \('decode', 'encode', 'prefill'\)"):
        Bucket(*sizes)


def test_bucket_names_and_orders() -> None:
    bucket = Bucket("decode", 4, 3)
    assert (bucket.name, bucket.tokens) == ("decode-b4-q3", 12)
    assert sorted([Bucket("prefill", 1, 8), Bucket("decode", 4, 1), Bucket("decode", 2, 5)])[0] == Bucket("decode", 2, 5)


def test_limits() -> None:
    assert Limits(16, 9, 5, 64).pages_per_request == 4
    with pytest.raises(SpecError, match="max_model_len 65 is not a multiple of page_size 16"):
        Limits(16, 9, 5, 65)


@pytest.mark.parametrize("name", ["page_size", "num_pages", "num_slots", "max_model_len", "slots_per_request"])
def test_limits_are_positive(name: str) -> None:
    sizes = {"page_size": 16, "num_pages": 9, "num_slots": 5, "max_model_len": 64, "slots_per_request": 1}
    for bad in (0, -16):
        with pytest.raises(SpecError, match=f"{name} is {bad}; it is at least 1"):
            Limits(**{**sizes, name: bad})


def test_a_request_has_a_slot_for_each_candidate_and_a_request_slot() -> None:
    limits = Limits(page_size=16, num_pages=9, num_slots=9, max_model_len=64, slots_per_request=4, drafts=3)
    assert limits.num_request_slots == 3, "two requests and the null request slot"
    assert Limits(page_size=16, num_pages=9, num_slots=9, max_model_len=64, slots_per_request=1, drafts=3).num_request_slots == 9
    for slots, drafts in ((2, 3), (4, 0), (1, -1)):
        with pytest.raises(SpecError, match=f"{slots} slots per request and {drafts} drafts; legal are at least 0 drafts"):
            Limits(page_size=16, num_pages=9, num_slots=9, max_model_len=64, slots_per_request=slots, drafts=drafts)
