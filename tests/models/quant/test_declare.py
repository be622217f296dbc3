"""models/quant.py: quantised declarations are what quantising a checkpoint's floats gives, and both forms multiply."""

from __future__ import annotations

import pytest
import torch

from npucompile.graphs import ops
from npucompile.graphs.errors import ModelError
from npucompile.graphs.quantise import quantise_w4, quantise_w8
from npucompile.graphs.types import Aval
from npucompile.models import quant
from npucompile.models.params import Param, Source

R = torch.Generator().manual_seed(0)
A, B = torch.randn(6, 8, generator=R), torch.randn(10, 8, generator=R)
MATRIX = Param(Aval((16, 8), torch.bfloat16, ("heads", None)), Source(("a", "b"), ((6, 8), (10, 8)), lambda a, b: torch.cat([a, b])))
E, K, N = 3, 8, 16
EXPERTS = torch.randn(E, K, N, generator=R)
# As a checkpoint has it: [E, N, K].
GROUPED = Param(
    Aval((E, K, N), torch.bfloat16, ("experts", None, None)), Source(("w",), ((E, N, K),), lambda w: w.transpose(1, 2).contiguous())
)


def joined(params: dict[str, Param], *tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    """The leaves of quantised parameters, checked against their abstract values."""
    leaves = {name: param.source.join(*tensors) for name, param in params.items()}
    for name, param in params.items():
        assert (tuple(leaves[name].shape), leaves[name].dtype) == (param.aval.shape, param.aval.dtype), name
    return leaves


def test_a_plain_matrix_stays_what_it_is() -> None:
    assert quant.LINEAR["plain"](MATRIX) is MATRIX


def test_a_matrix_becomes_integers_and_scales() -> None:
    params = quant.LINEAR["w8a8"](MATRIX)
    assert {name: (p.aval.shape, p.aval.dtype, p.aval.axes) for name, p in params.items()} == {
        "weight": ((8, 16), torch.int8, (None, "heads")),
        "scale": ((16,), torch.float32, ("heads",)),
    }
    assert all((p.source.names, p.source.shapes) == (MATRIX.source.names, MATRIX.source.shapes) for p in params.values())
    leaves, whole = joined(params, A, B), torch.cat([A, B])
    assert [torch.equal(a, b) for a, b in zip(leaves.values(), quantise_w8(whole.t()), strict=True)] == [True, True]
    assert ((leaves["weight"] * leaves["scale"]).t() - whole).abs().max() <= leaves["scale"].max() / 2 + 1e-6


def test_either_form_multiplies() -> None:
    x, whole = torch.randn(5, 8, generator=R), torch.cat([A, B])
    assert torch.equal(quant.linear(x, whole), ops.linear(x, whole))
    leaves = joined(quant.LINEAR["w8a8"](MATRIX), A, B)
    product = quant.linear(x, leaves)
    assert torch.equal(product, ops.quant_linear(x, leaves["weight"], leaves["scale"]))
    error = (product - x @ whole.t()).square().mean().sqrt() / (x @ whole.t()).std()
    assert 1e-4 < error < 0.03


@pytest.mark.parametrize(
    ("form", "declared"),
    [
        ("grouped", {"weight": ((E, K, N), torch.bfloat16, ("experts", None, None))}),
        ("w8a8", {"weight": ((E, K, N), torch.int8, ("experts", None, None)), "scale": ((E, N), torch.float32, ("experts", None))}),
        (
            "w4a8",
            {
                "weight": ((E, K, N // 8), torch.int32, ("experts", None, None)),
                "scale": ((E, 1, N), torch.int64, ("experts", None, None)),
                "assist": ((E, N), torch.float32, ("experts", None)),
            },
        ),
    ],
)
def test_experts_are_stored_as_grouped_products_read_them(form: str, declared: dict[str, tuple[object, ...]]) -> None:
    params = quant.grouped(GROUPED, form)
    assert {name: (p.aval.shape, p.aval.dtype, p.aval.axes) for name, p in params.items()} == declared
    assert list(params) == list(declared), "in the order of the products' operands"
    leaves = {name: param.source.join(EXPERTS.transpose(1, 2)) for name, param in params.items()}
    want = {"grouped": (EXPERTS,), "w8a8": quantise_w8(EXPERTS), "w4a8": quantise_w4(EXPERTS)}[form]
    for name, tensor in zip(leaves, want, strict=True):
        assert torch.equal(leaves[name], tensor), name
        assert tuple(leaves[name].shape) == params[name].aval.shape


def test_quantised_parameters_cannot_be_saved() -> None:
    for param in (*quant.LINEAR["w8a8"](MATRIX).values(), *quant.grouped(GROUPED, "w4a8").values()):
        with pytest.raises(ModelError, match="cannot be turned back into the floats of a checkpoint; save the model it was quantised from"):
            param.source.split(torch.zeros(param.aval.shape))
    assert quant.grouped(GROUPED, "grouped")["weight"] is GROUPED, "what is not quantised can"
