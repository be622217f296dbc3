"""models/quant/settings.py: a legal value is taken, every other one is refused by the setting's name, and so is an unknown setting."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import FineGrainedFP8Config

from npucompile.graphs.errors import CheckpointError
from npucompile.models.quant import settings

TABLES = {name: table for name, table in vars(settings).items() if name.isupper() and isinstance(table, dict) and name[0] != "_"}
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-200, 200)
    | st.sampled_from(["int", "token", "channel", "static", "dense", "ue8m0"])
    | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=2),
    max_leaves=4,
)


def legal(table: settings.Known) -> dict[str, Any]:
    """A legal value of each setting."""
    return {name: values[0] for name, values in table.items() if values is not None}


@pytest.mark.parametrize("name", TABLES)
@given(data=st.data(), value=JSON)
def test_only_legal_values_are_taken(name: str, data: st.DataObject, value: Any) -> None:
    table = TABLES[name]
    setting = data.draw(st.sampled_from([*table, "later"]))
    changed = {**legal(table), setting: value}
    values = table.get(setting, (None,))
    if values is None or value in values:
        settings.check("here", changed, table)
    else:
        with pytest.raises(CheckpointError, match=rf"^here: {setting} is "):
            settings.check("here", changed, table)


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_what_transformers_writes_of_fp8_is_known(scale_fmt: str) -> None:
    written = FineGrainedFP8Config(modules_to_not_convert=["lm_head"], scale_fmt=scale_fmt).to_dict()
    settings.check("here", {**written, "weight_block_size": list(written["weight_block_size"])}, settings.FP8)
    with pytest.raises(CheckpointError, match=r"weight_block_size is \[64, 128\]; legal is \[128, 128\]"):
        settings.check("here", {**written, "weight_block_size": [64, 128]}, settings.FP8)
