"""tools/quantize/packed.py: words unpack to the integers, and what stays float is ignored; test_driver.py compares with the library."""

from __future__ import annotations

import re
from types import SimpleNamespace

from npucompile.tools.quantize.packed import quantization_config


def test_what_stays_float_is_ignored():
    names = {"model.embed_tokens.weight": 2, "model.norm.weight": 1, "m.layers.1.mlp.gate.weight": 2, "m.layers.1.mlp.experts.down_proj": 3}
    config = quantization_config(0, [SimpleNamespace(name=name, shape=(4,) * rank) for name, rank in names.items()])
    assert config["config_groups"]["group_0"]["weights"]["strategy"] == "channel"
    *plain, experts = config["ignore"]
    assert plain == ["lm_head", "model.embed_tokens", "m.layers.1.mlp.gate"]
    assert re.match(experts.removeprefix("re:"), "m.layers.1.mlp.experts.3.down_proj")
