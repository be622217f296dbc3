"""tools/face/calls.py: arguments are matched with what a function was traced for, split for ranks, and results put together."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from npucompile.graphs.errors import SpecError, VerifyError
from npucompile.graphs.ir.trace import trace
from npucompile.graphs.types import Aval, Leaf, Mesh, Rules
from npucompile.tools.face.calls import FunctionCall, shares, whole

F32 = torch.float32
X, W = Aval((4, 6), F32), {"w": Aval((6, 2), F32, (None, "out")), "b": [Aval((2,), F32)]}


def affine(x: torch.Tensor, p: dict[str, Any]) -> Any:
    y = x @ p["w"] + p["b"][0]
    return {"y": y, "twice": (y, [x]), "x": x}


def test_a_tree_comes_back_as_the_function_returns_it() -> None:
    """A tensor that is returned several times is one output."""
    call = FunctionCall.of(affine, (X, W))
    traced = trace(call.program())
    assert [leaf.name for leaf in traced.signature.operands] == ["inputs.x", "inputs.p.w", "inputs.p.b.0"]
    assert len(traced.signature.outputs) == 2
    values = [torch.randn(leaf.aval.shape) for leaf in traced.signature.operands]
    arguments = (values[0], {"w": values[1], "b": [values[2]]})
    got, want = call.result(traced.graph(*call.operands(arguments))), affine(*arguments)
    assert got.keys() == want.keys()
    assert torch.equal(got["y"], want["y"])
    assert got["twice"][0] is got["y"]
    assert isinstance(got["twice"], tuple)
    assert torch.equal(got["twice"][1][0], arguments[0])


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (affine, ["x", "p"]),
        (lambda *both: affine(*both), ["arg0", "arg1"]),
        (lambda coords, p: affine(coords, p), ["arg0", "arg1"]),
        (functools.partial(lambda scale, x, p: x * scale, 2.0), ["x", "p"]),
        (torch.add, ["arg0", "arg1"]),
    ],
    ids=["names", "any number", "the name of an input of graphs", "a partial", "no signature"],
)
def test_operands_have_the_names_of_arguments(function: Any, names: list[str]) -> None:
    assert list(FunctionCall.of(function, (X, X)).avals) == names


def test_tensors_stand_for_their_avals() -> None:
    call = FunctionCall.of(affine, (torch.zeros(4, 6, dtype=torch.bfloat16), W))
    assert call.avals["x"] == Aval((4, 6), torch.bfloat16)
    listed: Any = Aval([4, 6], F32)  # type: ignore[arg-type]
    assert FunctionCall.of(affine, (listed, W)).avals["x"] == X


@pytest.mark.parametrize(
    ("function", "avals", "message"),
    [
        (affine, (X,), r"affine cannot be called with 1 positional arguments: missing a required argument: 'p'"),
        (affine, (X, W, X), r"affine cannot be called with 3 positional arguments: too many"),
        (affine, (X, {"w": X, "b": [2]}), r"affine: p\.b\.0 is 2; legal is an Aval\(shape, dtype, axes\) or a tensor; bind other"),
        (affine, (Aval((4,), "f32"), W), r"affine: x has dtype 'f32'; legal is a torch\.dtype, as torch\.float32"),  # type: ignore[arg-type]
        (3, (), r"int 3 is not callable; legal is a function of trees of tensors"),
    ],
)
def test_what_are_no_avals_of_a_function_is_refused(function: Any, avals: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        FunctionCall.of(function, avals)


RIGHT = (torch.zeros(4, 6), {"w": torch.zeros(6, 2), "b": [torch.zeros(2)]})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (RIGHT[:1], r"affine is called with 1 arguments; it was traced for x, p"),
        ((RIGHT[0], {"w": torch.zeros(6, 2)}), r"affine: p has w; it was traced as w, b\.0"),
        ((RIGHT[0], {"w": torch.zeros(6, 2), "b": (torch.zeros(2),)}), r"affine: p has w, b\.0; .* in trees of the same kinds"),
        ((torch.zeros(4, 7), RIGHT[1]), r"affine: x is f32\[4,7\]; it was traced as f32\[4,6\]"),
        ((torch.zeros(4, 6).double(), RIGHT[1]), r"affine: x is torch\.float64\[4,6\]; it was traced as f32\[4,6\]"),
        ((RIGHT[0], {"w": 3, "b": [torch.zeros(2)]}), r"affine: p\.w is 3; legal is a tensor, f32\[6,2\]"),
        ((torch.zeros(4, 6, device="meta"), RIGHT[1]), r"affine: x is on meta; legal is a tensor of the CPU"),
    ],
)
def test_arguments_that_were_not_traced_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        FunctionCall.of(affine, (X, W)).operands(arguments)


def test_operands_are_contiguous_and_without_gradients() -> None:
    (operand,) = FunctionCall.of(torch.nn.functional.silu, (X,)).operands([torch.zeros(6, 4, requires_grad=True).t()])
    assert operand.is_contiguous()
    assert not operand.requires_grad


def test_parts_of_ranks_make_the_whole() -> None:
    mesh, rules = Mesh.parse("x=2,y=3"), Rules.of({"a": "x", "b": ("x", "y")})
    value, aval = torch.arange(72.0).view(12, 6), Aval((12, 6), F32, ("b", None))
    parts = shares([value, value[:1]], [aval, Aval((1, 6), F32)], mesh, rules)
    assert [part[0][0, 0].item() for part in parts] == [0, 12, 24, 36, 48, 60]
    assert [part[2].tolist() for part in parts] == [[0, 0, x, y] for x in range(2) for y in range(3)]
    assert torch.equal(whole(Leaf("outputs.y", rules.local_aval(aval, mesh)), [part[0] for part in parts], mesh, rules), value)
    assert len(shares([value], [aval], Mesh(), rules)[0]) == 1, "one device needs no coordinates"


def test_ranks_that_disagree_on_what_all_have_are_found() -> None:
    ones = [torch.full((2,), float("nan")) for _ in range(4)]
    assert whole(Leaf("outputs.y", Aval((2,), F32)), ones, Mesh.parse("x=4"), Rules()).isnan().all()
    with pytest.raises(VerifyError, match=r"outputs\.y: rank 0 of mesh x=4 has other values than a rank of the same part"):
        whole(Leaf("outputs.y", Aval((2,), F32)), [*ones[1:], torch.ones(2)], Mesh.parse("x=4"), Rules())
