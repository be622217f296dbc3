"""models/qwen3.py: configurations are read in the forms of both versions of transformers, and malformed ones refused."""

from __future__ import annotations

import pytest
from support import oracle

from npucompile.models import qwen3


def test_older_files_read_the_same():
    values = oracle.CASES["plain-moe"]
    older = {key: value for key, value in values.items() if key != "rope_parameters"} | {"rope_theta": 10_000, "rope_scaling": None}
    older["num_local_experts"] = older.pop("num_experts")
    assert qwen3.read_config(older) == qwen3.read_config(values)


@pytest.mark.parametrize("name", ["plain-moe", "plain-moe-some-dense"])
def test_layers_without_experts_are_those_of_transformers(name):
    random = oracle.case(name)
    theirs = [qwen3.MOE if hasattr(layer.mlp, "experts") else qwen3.DENSE for layer in random.theirs.model.layers]
    assert list(random.model.config.layer_kinds) == theirs
