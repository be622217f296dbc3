"""models/params.py: declared parameters have abstract values, and one seed fixes their random tensors."""

from __future__ import annotations

import torch

from npucompile.graphs import tree
from npucompile.graphs.types import Aval
from npucompile.models.params import Param, Source, avals, initialise


def param(shape, init, dtype=torch.float32) -> Param:
    return Param(Aval(shape, dtype, ("vocab", *(None,) * (len(shape) - 1))), Source(("w",), (shape,)), init)


PARAMS = {
    "a": [param((4096, 64), "normal"), param((64,), "zeros", torch.bfloat16)],
    "b": (param((3, 5), "ones"), param((4096, 16), "embedding")),
}


def test_avals_keep_the_structure():
    assert avals(PARAMS) == {"a": [p.aval for p in PARAMS["a"]], "b": tuple(p.aval for p in PARAMS["b"])}


def test_each_kind_of_initialisation():
    drawn = initialise(PARAMS, torch.Generator().manual_seed(0))
    assert abs(drawn["a"][0].std() * 8 - 1) < 0.01
    assert abs(drawn["a"][0].mean()) < 1e-3
    assert torch.equal(drawn["a"][1], torch.zeros(64, dtype=torch.bfloat16))
    assert torch.equal(drawn["b"][0], torch.ones(3, 5))
    assert abs(drawn["b"][1].std() / 0.02 - 1) < 0.02


def test_one_seed_gives_one_model():
    first, second = (initialise(PARAMS, torch.Generator().manual_seed(5)) for _ in range(2))
    other = initialise(PARAMS, torch.Generator().manual_seed(6))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(tree.flatten(first), tree.flatten(second), strict=True))
    assert not torch.equal(first["a"][0], other["a"][0])


def test_source_axes_are_declared_or_those_of_the_parameter_that_is_its_source() -> None:
    aval = Aval((4, 6), torch.float32, ("rows", None))
    assert Param(aval, Source(("w",), ((4, 6),))).source_axes == (("rows", None),)
    assert Param(aval, Source(("w",), ((6, 4),), torch.t)).source_axes == ((None, None),)
    assert Param(aval, Source(("w",), ((6, 4),), torch.t, axes=((None, "rows"),))).source_axes == ((None, "rows"),)
    # The same elements in another shape: its dimensions are not the parameter's.
    assert Param(aval, Source(("w",), ((4, 3, 2),))).source_axes == ((None, None, None),)
