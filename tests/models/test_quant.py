"""Quantised declarations say what quantising a checkpoint's floats makes, and either form of a matrix multiplies."""

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


def made(params: dict[str, Param], *tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    """Each leaf, which is what its aval says."""
    found = {name: param.source.join(*tensors) for name, param in params.items()}
    for name, param in params.items():
        assert (tuple(found[name].shape), found[name].dtype) == (param.aval.shape, param.aval.dtype), name
    return found


def test_a_plain_matrix_stays_what_it_is() -> None:
    assert quant.LINEAR["plain"](MATRIX) is MATRIX


def test_a_matrix_becomes_integers_and_scales() -> None:
    params = quant.LINEAR["w8a8"](MATRIX)
    assert {name: (p.aval.shape, p.aval.dtype, p.aval.axes) for name, p in params.items()} == {
        "weight": ((8, 16), torch.int8, (None, "heads")),
        "scale": ((16,), torch.float32, ("heads",)),
    }
    assert all((p.source.names, p.source.shapes) == (MATRIX.source.names, MATRIX.source.shapes) for p in params.values())
    held, whole = made(params, A, B), torch.cat([A, B])
    assert [torch.equal(a, b) for a, b in zip(held.values(), quantise_w8(whole.t()), strict=True)] == [True, True]
    assert ((held["weight"] * held["scale"]).t() - whole).abs().max() <= held["scale"].max() / 2 + 1e-6


def test_either_form_multiplies() -> None:
    x, whole = torch.randn(5, 8, generator=R), torch.cat([A, B])
    assert torch.equal(quant.linear(x, whole), ops.linear(x, whole))
    held = made(quant.LINEAR["w8a8"](MATRIX), A, B)
    got = quant.linear(x, held)
    assert torch.equal(got, ops.quant_linear(x, held["weight"], held["scale"]))
    error = (got - x @ whole.t()).square().mean().sqrt() / (x @ whole.t()).std()
    assert 1e-4 < error < 0.03


@pytest.mark.parametrize(
    ("form", "wanted"),
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
def test_experts_are_held_as_grouped_products_read_them(form: str, wanted: dict[str, tuple[object, ...]]) -> None:
    params = quant.grouped(GROUPED, form)
    assert {name: (p.aval.shape, p.aval.dtype, p.aval.axes) for name, p in params.items()} == wanted
    assert list(params) == list(wanted), "in the order of the products' operands"
    held = {name: param.source.join(EXPERTS.transpose(1, 2)) for name, param in params.items()}
    want = {"grouped": (EXPERTS,), "w8a8": quantise_w8(EXPERTS), "w4a8": quantise_w4(EXPERTS)}[form]
    for name, tensor in zip(held, want, strict=True):
        assert torch.equal(held[name], tensor), name
        assert tuple(held[name].shape) == params[name].aval.shape


def test_quantised_parameters_cannot_be_saved() -> None:
    for param in (*quant.LINEAR["w8a8"](MATRIX).values(), *quant.grouped(GROUPED, "w4a8").values()):
        with pytest.raises(ModelError, match="cannot be turned back into the floats of a checkpoint; save the model it was quantised from"):
            param.source.split(torch.zeros(param.aval.shape))
    assert quant.grouped(GROUPED, "grouped")["weight"] is GROUPED, "what is not quantised can"
