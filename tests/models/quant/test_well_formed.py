"""models/quant/well_formed.py: whatever a quantization_config holds, it is read or refused by a sentence."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import tiny

from npucompile.graphs.errors import CheckpointError, ModelError
from npucompile.models.quant.description import formats_in

GROUP = {
    "targets": ["Linear"], "format": "pack-quantized", "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel"},
}  # fmt: skip
CONFIG = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": GROUP}, "ignore": ["lm_head"]}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "Linear", "re:*.mlp", "re:(", "fp8", "int", "channel"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from([*GROUP, "num_bits", "x"]), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny.write_checkpoint(tmp_path_factory.mktemp("quantised"), tokenizer=False)


def read(directory, config):
    values = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**values, "quantization_config": config}))
    return formats_in(directory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config_groups": [1]}, r"config_groups is \[1\]; expected an object"),
        ({"config_groups": {"g": None}}, "config_groups: g is None; expected an object"),
        ({"config_groups": {"g": GROUP | {"weights": "int4"}}}, "config_groups: g: weights is 'int4'; expected an object"),
        ({"config_groups": {"g": GROUP | {"targets": ["re:*.mlp"]}}}, r"g: targets has 're:\*\.mlp', which is no regular expression"),
        ({"config_groups": {"g": GROUP | {"targets": "Linear"}}}, "g: targets is 'Linear'; expected a list of texts"),
        ({"ignore": [3]}, r"ignore is \[3\]; expected a list of texts"),
        ({"format": ["int-quantized"]}, r"format is \['int-quantized'\]; expected a text"),
        ({"quant_method": {"fp8": 1}}, "quant_method is {'fp8': 1}; expected a text"),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(directory, change, message):
    with pytest.raises(CheckpointError, match=message):
        read(directory, CONFIG | change)


@given(at=st.sampled_from([(), ("config_groups",), ("config_groups", "group_0"), ("config_groups", "group_0", "weights")]), data=st.data())
def test_whatever_settings_of_a_quantisation_are_they_are_read_or_refused(directory, at, data):
    config = json.loads(json.dumps(CONFIG))
    place = config
    for name in at:
        place = place[name]
    place[data.draw(st.sampled_from([*place, "input_activations", "group_size", "actorder"]))] = data.draw(JSON)
    with contextlib.suppress(ModelError):
        read(directory, config)
