"""models/quant/recipes.py: each recipe names formats that are, for matrices that a model has."""

from __future__ import annotations

import pytest

from npucompile.graphs.errors import SpecError
from npucompile.models.quant.formats import PLAIN
from npucompile.models.quant.recipes import SCHEMES, formats_of_scheme


def test_a_scheme_that_is_not_there_is_refused() -> None:
    with pytest.raises(SpecError, match="quantization is 'int3'; legal are none, w8a8, w4a8"):
        formats_of_scheme("int3", "qwen3.5-397b")
    assert formats_of_scheme("none", "qwen3.5-397b") == PLAIN


@pytest.mark.parametrize(
    ("model", "scheme", "wanted"),
    [
        (
            "qwen3.5-397b",
            "w4a8",
            {"self_attn.q_proj": "w8a8_dynamic", "self_attn.o_proj": "float", "mlp.experts.down_proj": "w4a8_dynamic"},
        ),
        ("qwen3.5-397b", "w4a8", {"mlp.shared_expert.down_proj": "float", "linear_attn.in_proj_z": "float", "mlp.gate": "float"}),
        ("qwen3.5-27b", "w8a8", {"self_attn.o_proj": "w8a8_dynamic", "mlp.down_proj": "w8a8_dynamic", "linear_attn.in_proj_z": "float"}),
        ("qwen3.6-27b", "w8a8", {"linear_attn.in_proj_z": "w8a8_dynamic", "linear_attn.in_proj_b": "float"}),
        ("somebody's own", "w8a8", {"self_attn.o_proj": "w8a8_dynamic", "mlp.up_proj": "w8a8_dynamic", "mlp.gate": "float"}),
        ("somebody's own", "w4a8", {"mlp.experts.gate_up_proj": "w4a8_dynamic", "mlp.shared_expert.up_proj": "w8a8_dynamic"}),
    ],
)
def test_recipes_are_the_published_ones(model: str, scheme: str, wanted: dict[str, str]) -> None:
    formats = formats_of_scheme(scheme, model)
    assert {name: formats.of([f"model.layers.7.{name}"]) for name in wanted} == wanted
    assert formats.of(["mtp.layers.0.self_attn.q_proj.weight"]) == "float"
    assert "none" in SCHEMES
