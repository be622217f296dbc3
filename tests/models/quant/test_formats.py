"""models/quant/formats.py: the first rule that matches decides; what none matches is float."""

from __future__ import annotations

import pytest

from npucompile.graphs.errors import CheckpointError
from npucompile.models.quant.formats import PLAIN, Formats

FORMATS = Formats((("model.layers.1.*", "float"), ("*.self_attn.?_proj", "w8a8_dynamic"), ("*.experts.*", "w4a8_dynamic")), group=64)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "w8a8_dynamic"),
        ("model.layers.1.self_attn.q_proj.weight", "float"),
        ("model.layers.10.self_attn.q_proj.weight", "w8a8_dynamic"),
        ("model.layers.0.self_attn.q_norm.weight", "float"),
        ("model.layers.0.mlp.experts.gate_up_proj", "w4a8_dynamic"),
        ("model.embed_tokens.weight", "float"),
    ],
)
def test_rules_decide_by_name(name: str, form: str) -> None:
    assert FORMATS.of([name]) == form
    assert PLAIN.of([name]) == "float"


def test_matrices_of_one_product_have_one_format() -> None:
    names = ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_norm.weight"]
    assert FORMATS.agree(names[:1])
    assert not FORMATS.agree(names)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight is w8a8_dynamic, .*k_norm\.weight is float; they are multiplied as one"):
        FORMATS.of(names)


def test_formats_are_fields_of_a_manifest() -> None:
    assert Formats.of_fields(FORMATS.as_fields()) == FORMATS
    assert Formats.of_fields({}) == PLAIN
    assert (FORMATS.quantises, PLAIN.quantises) == (True, False)


def test_matrices_can_be_left_float() -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    assert FORMATS.floats_first("*.self_attn.*").of([name]) == "float"
