"""graphs/sizes.py: meshes, buckets and limits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs.errors import SpecError
from npucompile.graphs.sizes import Bucket, Limits, Mesh

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


@pytest.mark.parametrize("sizes", [("decode", 0, 1), ("prefill", 1, 0), ("decode", -1, 1)])
def test_bucket_refuses(sizes: tuple[str, int, int]) -> None:
    with pytest.raises(SpecError, match="/".join(map(str, sizes)) + ": sizes are at least 1"):
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
