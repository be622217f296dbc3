"""models/qwen3_5.py: configurations of every published form are read, and malformed ones refused."""

from __future__ import annotations

from dataclasses import replace

from support import oracle

from npucompile.models import qwen3_5


def test_layer_types_follow_the_interval_when_they_are_absent():
    values = {**oracle.CASES["moe"], "num_hidden_layers": 7, "layer_types": None, "full_attention_interval": 3}
    kinds = qwen3_5.read_config(values).layer_types
    assert [i for i, kind in enumerate(kinds) if kind == "full_attention"] == [2, 5]


def test_wrapped_and_older_configurations_read_the_same():
    values = oracle.CASES["dense"]
    plain = qwen3_5.read_config(values)
    assert qwen3_5.read_config({"text_config": values, "vision_config": {"depth": 3}}) == plain
    older = {key: value for key, value in values.items() if key != "rope_parameters"}
    older.update(rope_theta=10000, partial_rotary_factor=0.25, rope_scaling={"type": "mrope"})
    assert qwen3_5.read_config(older) == plain
    older["rope_scaling"]["mrope_section"] = [1, 1, 0]
    assert qwen3_5.read_config(older) == replace(plain, rotary=replace(plain.rotary, sections=(1, 1, 0)))
