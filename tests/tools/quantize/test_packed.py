"""tools/quantize/packed.py: words unpack to the integers, and what stays float is ignored; test_driver.py compares with the library."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from npucompile.graphs.quantise import unpack_columns
from npucompile.tools.quantize.packed import packed, quantization_config


@pytest.mark.parametrize("group", [0, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_words_and_scales_are_the_floats_they_stand_for(group, dtype):
    values = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    tensors, floats = packed(values, group, dtype)
    scale = tensors["weight_scale"]
    assert (scale.shape, scale.dtype) == ((6, 5 if group else 1), dtype)
    assert torch.equal(scale.bfloat16().to(dtype), scale)
    assert tensors["weight_shape"].tolist() == [6, 40]
    assert torch.equal(unpack_columns(tensors["weight_packed"], 40) * scale.float().repeat_interleave(group or 40, 1), floats)
    assert ((floats - values.float()).abs() <= 0.51 * scale.float().repeat_interleave(group or 40, 1)).all()


def test_what_stays_float_is_ignored():
    names = {"model.embed_tokens.weight": 2, "model.norm.weight": 1, "m.layers.1.mlp.gate.weight": 2, "m.layers.1.mlp.experts.down_proj": 3}
    config = quantization_config(0, [SimpleNamespace(name=name, shape=(4,) * rank) for name, rank in names.items()])
    assert config["config_groups"]["group_0"]["weights"]["strategy"] == "channel"
    *plain, experts = config["ignore"]
    assert plain == ["lm_head", "model.embed_tokens", "m.layers.1.mlp.gate"]
    assert re.match(experts.removeprefix("re:"), "m.layers.1.mlp.experts.3.down_proj")
