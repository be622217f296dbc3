"""graphs/types.py: bad values of the basic types are refused with an error that contains them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs.errors import PartitionError, SpecError
from npucompile.graphs.types import Aval, Mesh, Rules

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
