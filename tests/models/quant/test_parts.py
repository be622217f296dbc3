"""models/quant/parts.py: where tensors of one matrix have different formats, each part is stored and multiplied in its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from support import fleets

from npucompile.graphs import ops, tree
from npucompile.graphs.errors import CheckpointError
from npucompile.graphs.types import Aval, Tree
from npucompile.models import feed_forward, quant
from npucompile.models.params import Param, Source
from npucompile.models.quant.declare import stored
from npucompile.models.quant.formats import Formats
from npucompile.models.quant.parts import apart
from npucompile.models.quant.product import rebuilt

R = torch.Generator().manual_seed(0)
T, M, F = 5, 16, 24


@dataclass(frozen=True)
class Storage:
    formats: Formats
    grouped: bool = False

    def parts(self, axis: str | None) -> int:
        return 1


def loaded(params: Tree, tensors: dict[str, torch.Tensor]) -> Tree:
    return tree.map_leaves(lambda p: p.source.join(*(tensors[name] for name in p.source.names)), params)


def drawn(param: Param) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape, generator=R) for name, shape in zip(param.source.names, param.source.shapes, strict=True)}


def of_one_format(param: Param, form: str, tensors: dict[str, torch.Tensor]) -> Tree:
    return loaded(stored(param, Storage(Formats((("*", form),)))), tensors)


@pytest.mark.parametrize("formats", [("float", "w8a8_dynamic"), ("w8a8_dynamic", "float"), ("float", "w8a8"), ("w8a8", "w8a8_dynamic")])
def test_gate_and_up_are_two_products(formats: tuple[str, str]) -> None:
    """Each bit for bit that of the whole matrix in its format."""
    param, _ = feed_forward.swiglu_params(M, F, torch.float32, "mlp.")
    tensors, x = drawn(param), torch.randn(T, M, generator=R)
    rules = tuple(zip(("mlp.gate_proj", "mlp.up_proj"), formats, strict=True))
    declared = stored(param, Storage(Formats(rules)))
    assert isinstance(declared, list)
    weight = loaded(declared, tensors)
    for (_, leaf), (_, made) in zip(tree.flatten(declared), tree.flatten(weight), strict=True):
        assert (leaf.aval.shape, leaf.aval.dtype) == (tuple(made.shape), made.dtype)
    halves = [_both(x, of_one_format(param, form, tensors)).chunk(2, -1)[i] for i, form in enumerate(formats)]
    assert torch.equal(quant.swiglu(x, weight, "ffn"), torch.nn.functional.silu(halves[0]) * halves[1])
    again = rebuilt(weight, [tensor for _, tensor in tree.flatten(weight)])
    assert torch.equal(quant.swiglu(x, again, "ffn"), quant.swiglu(x, weight, "ffn"))


def _both(x: torch.Tensor, weight: Tree) -> torch.Tensor:
    """The product with gate and up of a weight in one format."""
    if isinstance(weight, torch.Tensor):
        return ops.linear(x, weight.flatten(0, 1))
    return quant.linear(x, {name: tensor.flatten(-2) if tensor.dim() > 1 else tensor for name, tensor in weight.items()})


FORMS = ("float", "w8a8_dynamic", "w8a8")


@pytest.mark.parametrize("model", ["small", "plain", "latent"])
@pytest.mark.parametrize("copies", [1, 2])
def test_attention_and_delta_rule_projections_are_taken_apart(model: str, copies: int) -> None:
    """Rows of key heads and key-value heads, with copies or without, go back to where they were."""
    variant = replace(fleets.PLAIN, kv_repeat=copies)
    params, compared = fleets.model(variant, experts=model != "plain", name=model).params(torch.float32), 0
    for _, param in tree.flatten(params):
        names = param.source.names
        if param.role != "column" or len(names) < 2 or "gate_proj" in names[0]:
            continue
        tensors, x = drawn(param), torch.randn(T, param.aval.shape[-1], generator=R)
        forms = {name: FORMS[i % 3] for i, name in enumerate(names)}
        rules = tuple((name.removesuffix(".weight"), form) for name, form in forms.items())
        ours = quant.linear(x, loaded(stored(param, Storage(Formats(rules))), tensors))
        owner = param.source.join(*(torch.full((shape[0], 1), i) for i, shape in enumerate(param.source.shapes))).flatten()
        for i, name in enumerate(names):
            whole = quant.linear(x, of_one_format(param, forms[name], tensors))
            assert (ours - whole)[:, owner == i].abs().max() < 1e-5, name
            compared += 1
    assert compared >= 4


def test_a_bias_that_one_of_them_has_is_added_to_its_part() -> None:
    param, _ = feed_forward.swiglu_params(M, F, torch.float32, "mlp.")
    tensors, x = {**drawn(param), "mlp.up_proj.bias": torch.randn(F, generator=R)}, torch.randn(T, M, generator=R)
    for forms in (("w8a8_dynamic", "float"), ("float", "w8a8_dynamic")):
        rules = tuple(zip(("mlp.gate_proj", "mlp.up_proj"), forms, strict=True))
        weight = loaded(stored(param, Storage(Formats(rules, biased=("mlp.up_proj",)))), tensors)
        gate, up = (_both(x, of_one_format(param, form, tensors)).chunk(2, -1)[i] for i, form in enumerate(forms))
        want = torch.nn.functional.silu(gate) * (up + tensors["mlp.up_proj.bias"])
        assert (quant.swiglu(x, weight, "ffn") - want).abs().max() < 1e-5


def joined(**changes: Any) -> Param:
    """Two tensors, whose rows are neither groups nor one behind the other."""
    source = Source(("a.weight", "b.weight"), ((8, M), (8, M)), lambda a, b: torch.cat([a[:4], b, a[4:]]))
    return replace(Param(Aval((16, M), torch.float32, ("n", None)), source, role="column"), **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"role": "row"},
        {"aval": Aval((2, 8, M), torch.float32, ("n", None, None))},
    ],
    ids=["its rows are in no groups", "its contraction may be split", "the parts are spread"],
)
def test_what_cannot_be_taken_apart_is_refused(changes: dict[str, Any]) -> None:
    formats = Formats((("a", "w8a8_dynamic"),))
    with pytest.raises(CheckpointError, match=r"a\.weight is w8a8_dynamic, b\.weight is float; they are multiplied as one matrix"):
        stored(joined(**changes), Storage(formats))
    with pytest.raises(CheckpointError, match=r"they read the same rounded activations, which int4's kernel overwrites"):
        stored(joined(), Storage(Formats((("a", "w4a8_dynamic"),))))
    whole = joined()
    assert apart(whole, Formats((("*", "w8a8_dynamic"),)))[0] is whole
