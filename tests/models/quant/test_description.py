"""models/quant/description.py: a description's types become rules, and what is not read here is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from npucompile.graphs.errors import CheckpointError
from npucompile.models.quant.description import DESCRIPTION, canonical, formats_in

ATTENTION = "model.language_model.layers.{}.self_attn.q_proj.weight"
EXPERT = "model.language_model.layers.{}.mlp.experts.{}.{}_proj.weight"


def described(directory: Path, values: dict[str, Any]) -> Path:
    (directory / DESCRIPTION).write_text(json.dumps({"version": "1.0.0", "model_quant_type": "W8A8", "group_size": 0, **values}))
    return directory


def test_types_become_rules(tmp_path: Path) -> None:
    types = {ATTENTION.format(i): "FLOAT" if i == 7 else "W8A8_DYNAMIC" for i in range(12)}
    for i in range(12):
        kind = "W8A8_DYNAMIC" if i == 11 else "W4A8_DYNAMIC"
        types |= {EXPERT.format(i, e, part): kind for e in range(4) for part in ("gate", "up", "down")}
    types |= {name.replace(".weight", ".weight_scale"): kind for name, kind in types.items()}
    types |= {"lm_head.weight": "FLOAT", "model.language_model.norm.weight": "FLOAT"}
    formats = formats_in(described(tmp_path, types))
    assert formats is not None
    assert formats.stored
    for i in range(12):
        assert formats.of([f"model.layers.{i}.self_attn.q_proj.weight"]) == ("float" if i == 7 else "w8a8_dynamic"), i
        for fused in ("gate_up_proj", "down_proj"):
            assert formats.of([f"model.layers.{i}.mlp.experts.{fused}"]) == ("w8a8_dynamic" if i == 11 else "w4a8_dynamic"), i
    assert formats.of(["lm_head.weight"]) == "float"
    assert len(formats.rules) == 3 + 1 + 2, "one for all layers of a kind, and the exceptions"


def test_scales_of_both_kinds_are_static_where_a_model_only_decodes(tmp_path: Path) -> None:
    directory = described(tmp_path, {ATTENTION.format(0): "W8A8_MIX"})
    for decodes_only, form in ((False, "w8a8_dynamic"), (True, "w8a8")):
        formats = formats_in(directory, decodes_only=decodes_only)
        assert formats is not None
        assert formats.of([canonical(ATTENTION.format(0))]) == form


INDEXER = "model.layers.{}.self_attn.indexer"


def test_indexers_that_are_named_cache_int8(tmp_path: Path) -> None:
    """As ModelSlim writes GLM-5 in W8A8C8, whose first and last layers are not named; vllm-ascend knows the other word."""
    kinds = {3: "QK_INT8_DYNAMIC", 4: "INT8_DYNAMIC", 5: "FLOAT"}
    said = {f"{INDEXER.format(i)}.quant_type": kind for i, kind in kinds.items()}
    formats = formats_in(described(tmp_path, {ATTENTION.format(0): "W8A8", "indexer_quant_type": "INT8_DYNAMIC", **said}))
    assert formats is not None
    assert [formats.of_cache(INDEXER.format(i)) for i in range(2, 7)] == ["float", "int8", "int8", "float", "float"]
    assert formats.of_cache("model.layers.3.self_attn") == "float"


def test_one_word_is_of_all_indexers(tmp_path: Path) -> None:
    formats = formats_in(described(tmp_path, {ATTENTION.format(0): "W8A8", "indexer_quant_type": "INT8_DYNAMIC"}))
    assert formats is not None
    assert [formats.of_cache(INDEXER.format(i)) for i in (0, 77)] == ["int8", "int8"]
    assert formats.of_cache("model.layers.0.self_attn") == "float"


def test_a_float_checkpoint_has_no_formats(tmp_path: Path) -> None:
    assert formats_in(tmp_path) is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({ATTENTION.format(0): "W4A4_MXFP4"}, r"q_proj\.weight is W4A4_MXFP4; legal are FLOAT, W8A8, W8A8_DYNAMIC, W4A8_DYNAMIC, W8A8_MIX"),
        (
            {EXPERT.format(0, 0, "gate"): "W8A8_DYNAMIC", EXPERT.format(0, 1, "gate"): "W4A8_DYNAMIC"},
            r"experts\.0\.gate_proj\.weight is W8A8_DYNAMIC and .*experts\.1\.gate_proj\.weight is W4A8_DYNAMIC; experts of",
        ),
        ({"group_size": -1}, "group_size is -1; expected a number of weights"),
        ({"kv_quant_type": "C4"}, "kv_quant_type is 'C4'; legal is 'C8' or null"),
        ({"reduce_quant_type": "per_channel"}, "reduce_quant_type is 'per_channel': sums of ranks are not rounded here; legal is null"),
        (
            {"indexer_quant_type": "FP8"},
            "indexer_quant_type is 'FP8': keys of indexers are rounded to int8 or not; legal",
        ),
        ({"model.layers.0.self_attn.indexer.quant_type": "FP8"}, r"indexer\.quant_type is 'FP8': keys of indexers are not rounded so"),
        ({"model.layers.0.self_attn.quant_type": "INT8_DYNAMIC"}, r"self_attn\.quant_type is 'INT8_DYNAMIC': int8 attention is not read"),
        (
            {"metadata": {"quarot": {"max_tp_size": 4, "heads_rotation": {"layers": ["model.layers.0.self_attn.o_proj."]}}}},
            "metadata: quarot is .*: rotations of activations are not computed here; legal is null",
        ),
        ({"activation_rounding": "up"}, "activation_rounding is 'up', a setting that is not known here; known are version, "),
        ({"model.layers.0.self_attn.k_proj.kv_cache_scale": "C4"}, r"k_proj\.kv_cache_scale is C4; legal are C8"),
    ],
)
def test_what_is_not_read_is_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        formats_in(described(tmp_path, values))


def test_a_description_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / DESCRIPTION).write_text("{")
    with pytest.raises(CheckpointError, match=f"{DESCRIPTION}: not readable as JSON"):
        formats_in(tmp_path)
