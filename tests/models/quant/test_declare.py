"""models/quant/declare.py: what is declared of a matrix is what its floats, or a checkpoint's integers, make."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product as combinations

import pytest
import torch

from npucompile.graphs.errors import CheckpointError, ModelError, SpecError
from npucompile.graphs.quantise import pack_rows
from npucompile.graphs.types import Aval, Tree
from npucompile.models.params import Param, Source
from npucompile.models.quant.declare import stored
from npucompile.models.quant.formats import FORMATS, Formats

R = torch.Generator().manual_seed(0)
K, ROWS, E = 16, (8, 24), 3
PARTS = {"k": 2}


@dataclass(frozen=True)
class Storage:
    formats: Formats
    grouped: bool = False

    def parts(self, axis: str | None) -> int:
        return PARTS.get(axis or "", 1)


# Two matrices that are multiplied as one, rows of the second first; a row-parallel one; experts, whose gate and up are one tensor.
COLUMN = Param(
    Aval((sum(ROWS), K), torch.bfloat16, ("n", None)),
    Source(("a.weight", "b.weight"), tuple((rows, K) for rows in ROWS), lambda a, b: torch.cat([b, a])),
    role="column",
)
ROW = Param(Aval((8, K), torch.bfloat16, (None, "k")), Source(("c.weight",), ((8, K),)), role="row")
GATE_UP = Param(
    Aval((E, 2, 8, K), torch.bfloat16, ("experts", None, "k", None)),
    Source(("experts.gate_up_proj",), ((E, 16, K),), lambda w: w.view(w.shape[0], 2, -1, w.shape[-1])),
    role="experts",
)
DOWN = Param(Aval((E, 8, K), torch.bfloat16, ("experts", None, "k")), Source(("experts.down_proj",), ((E, 8, K),)), role="experts_down")
MATRICES = {"column": COLUMN, "row": ROW, "experts": GATE_UP, "experts_down": DOWN}


def integers(param: Param, form: str, group: int) -> dict[str, torch.Tensor]:
    """What ModelSlim writes of random integers, by name; int4 are whole bytes in the result of `dequantised`."""
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in zip(param.source.names, param.source.shapes, strict=True):
        base, largest = name.removesuffix(".weight"), 7 if "w4" in form else 127
        tensors[name] = torch.randint(-largest - 1, largest + 1, shape, generator=R, dtype=torch.int8)
        scale = torch.rand(*shape[:-1], 1, generator=R) + 0.01
        if form == "w8a8":
            tensors |= {f"{base}.deq_scale": scale.squeeze(-1) * 0.02, f"{base}.quant_bias": (torch.arange(shape[0]) - 3).int()}
            tensors |= {f"{base}.input_scale": torch.tensor([0.02]), f"{base}.input_offset": torch.tensor([5.0])}
        else:
            tensors[f"{base}.weight_scale"] = scale
        if group:
            tensors[f"{base}.weight_scale_second"] = torch.rand(*shape[:-1], shape[-1] // group, generator=R) + 0.01
    return tensors


def made(param: Param, form: str, group: int, tensors: dict[str, torch.Tensor], *, from_integers: bool) -> Tree:
    """The tensors of a declared matrix, each checked against its abstract value."""
    declared = stored(param, Storage(Formats((("*", form),), from_integers, group)))
    lead = 1 if param.role.startswith("experts") else 0
    disk = {
        n: pack_rows(t, lead) if from_integers and form == "w4a8_dynamic" and n in param.source.names else t for n, t in tensors.items()
    }
    leaves = {}
    for name, each in declared.items():
        for source, shape in zip(each.source.names, each.source.shapes, strict=True):
            assert tuple(disk[source].shape) == shape, source
        leaves[name] = each.source.join(*(disk[source] for source in each.source.names))
        assert (tuple(leaves[name].shape), leaves[name].dtype) == (each.aval.shape, each.aval.dtype), name
    return leaves


def dequantised(param: Param, leaves: Tree) -> torch.Tensor:
    """The matrix `[lead..., out..., K]` that the tensors stand for."""
    from npucompile.graphs.quantise import bits_scale, unpack_w4

    lead, row = (1 if "experts" in param.role else 0), param.role in ("row", "experts_down")
    weight, scale = leaves["weight"], leaves["scale"]
    if weight.dtype == torch.int32:
        weight, scale = unpack_w4(weight), bits_scale(scale)
        scale = scale.repeat_interleave(weight.shape[lead] // scale.shape[lead], lead)
    elif row:
        assert all(torch.equal(part, scale[0]) for part in scale)
        scale = scale[0].unsqueeze(lead)
    else:
        scale = scale.unsqueeze(lead)
    return (weight * scale).movedim(lead, -1)


FORMS = [("w8a8_dynamic", 0), ("w4a8_dynamic", 0), ("w4a8_dynamic", 4)]


@pytest.mark.parametrize(("role", "form"), list(combinations(MATRICES, FORMS)), ids=str)
def test_integers_of_a_checkpoint_are_kept(role: str, form: tuple[str, int]) -> None:
    param, (name, group) = MATRICES[role], form
    tensors = integers(param, name, group)
    leaves = made(param, name, group, tensors, from_integers=True)
    parts = []
    for source in param.source.names:
        base = source.removesuffix(".weight")
        scale = tensors[f"{base}.weight_scale"]
        if group:
            scale = (scale * tensors[f"{base}.weight_scale_second"]).half().float().repeat_interleave(group, -1)
        parts.append(tensors[source] * scale)
    assert torch.equal(dequantised(param, leaves), param.source.join(*parts))


@pytest.mark.parametrize(("role", "form"), list(combinations(MATRICES, FORMS)), ids=str)
def test_floats_are_rounded_within_half_a_step(role: str, form: tuple[str, int]) -> None:
    param, (name, group) = MATRICES[role], form
    floats = {source: torch.randn(shape, generator=R) for source, shape in zip(param.source.names, param.source.shapes, strict=True)}
    whole = param.source.join(*floats.values())
    leaves = made(param, name, group, floats, from_integers=False)
    steps = (
        (whole.unflatten(-1, (-1, group or K)).abs().amax(-1, keepdim=True) / (7 if "w4" in name else 127))
        .expand(*whole.shape[:-1], -1, group or K)
        .flatten(-2)
    )
    assert ((dequantised(param, leaves) - whole).abs() <= 0.501 * steps).all()


@pytest.mark.parametrize("role", ["column", "row"])
def test_static_scales_of_a_checkpoint_are_kept(role: str) -> None:
    param = MATRICES[role]
    tensors = integers(param, "w8a8", 0)
    leaves = made(param, "w8a8", 0, tensors, from_integers=True)
    assert torch.equal(leaves["weight"], param.source.join(*(tensors[name] for name in param.source.names)).t())
    columns = {
        kind: param.source.join(*(tensors[f"{name.removesuffix('.weight')}.{kind}"][:, None] for name in param.source.names)).squeeze(1)
        for kind in ("deq_scale", "quant_bias")
    }
    if role == "row":
        assert leaves["scale"].tolist() == [columns["deq_scale"].tolist()] * 2
        assert leaves["quant_bias"].tolist() == [columns["quant_bias"].tolist(), [0] * 8], (
            "of the whole contraction, which the first part adds"
        )
    else:
        assert torch.equal(leaves["scale"], columns["deq_scale"])
        assert torch.equal(leaves["quant_bias"], columns["quant_bias"])
    assert (float(leaves["input_scale"]), float(leaves["input_offset"])) == (float(torch.tensor(0.02)), 5.0)
    # Models in float16 have the bits of float32 in 64 bits.
    bits = {name: t.view(torch.int32).long() if name.endswith("deq_scale") else t for name, t in tensors.items()}
    assert torch.equal(made(param, "w8a8", 0, bits, from_integers=True)["scale"], leaves["scale"])


def test_matrices_that_are_multiplied_as_one_have_one_scale_of_their_activations() -> None:
    tensors = integers(COLUMN, "w8a8", 0) | {"b.input_scale": torch.tensor([0.03])}
    with pytest.raises(
        CheckpointError, match=r"input_scale and input_offset of matrices that are multiplied as one are \[0\.0199.*0\.0299"
    ):
        made(COLUMN, "w8a8", 0, tensors, from_integers=True)
    with pytest.raises(CheckpointError, match=r"a\.weight is float, b\.weight is w8a8; they are multiplied as one matrix"):
        stored(COLUMN, Storage(Formats((("b", "w8a8"),))))


def test_what_is_not_quantised_stays_what_it_is() -> None:
    tree = {"column": COLUMN, "experts": GATE_UP, "norm": Param(Aval((4,), torch.float32), Source(("norm.weight",), ((4,),)))}
    assert stored(tree, Storage(Formats())) == tree
    turned = stored(GATE_UP, Storage(Formats(), grouped=True))["weight"]
    assert turned.aval == Aval((E, K, 2, 8), torch.bfloat16, ("experts", None, None, "k"))
    floats = torch.randn(E, 16, K, generator=R)
    assert torch.equal(turned.source.join(floats), floats.view(E, 2, 8, K).movedim(-1, 1))


@pytest.mark.parametrize(
    ("param", "formats", "error", "message"),
    [
        (
            GATE_UP,
            Formats((("*", "w8a8"),)),
            SpecError,
            "experts.gate_up_proj: the format is w8a8; legal for experts are float, w8a8_dynamic",
        ),
        (ROW, Formats((("*", "w4a8_dynamic"),), group=16), CheckpointError, "groups of 16 weights for a contraction of 16 in 2 parts"),
        (
            Param(Aval((4,), torch.float32), Source(("norm.weight",), ((4,),))),
            Formats((("*", "w8a8_dynamic"),)),
            SpecError,
            "norm.weight: the format is w8a8_dynamic; it is no matrix of a product, legal is float",
        ),
    ],
)
def test_formats_that_a_parameter_cannot_have_are_refused(param: Param, formats: Formats, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        stored(param, Storage(formats))


def test_quantised_parameters_cannot_be_saved() -> None:
    for form in ("w8a8_dynamic", "w4a8_dynamic", "w8a8"):
        for param in stored(COLUMN, Storage(Formats((("*", form),)))).values():
            with pytest.raises(ModelError, match="cannot be turned back into the floats of a checkpoint"):
                param.source.split(torch.zeros(param.aval.shape))


def test_every_format_is_named() -> None:
    with pytest.raises(SpecError, match=f"the format is 'fp3'; legal are {', '.join(FORMATS)}"):
        Formats((("*", "fp3"),))
