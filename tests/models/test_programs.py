"""models/programs.py: every kind of bucket has its program, over parameters and state that an artifact has once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import towers

from npucompile.graphs.ir.trace import signature_of
from npucompile.graphs.types import Bucket, Limits
from npucompile.models import programs, registry
from npucompile.models.step import Model

LIMITS = Limits(8, 9, 3, 64, picture_rows=60)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    found = registry.find(towers.saved("small patches", tmp_path_factory.mktemp("tower")))
    assert found.has_tower()
    return replace(found.model, tower=found.tower)


def test_programs_of_all_kinds_share_what_an_artifact_has(model: Model) -> None:
    whole = programs.leaves(model, LIMITS, torch.float32)
    buckets = [Bucket("encode", 2, 16), Bucket("prefill", 1, 8), Bucket("decode", 2, 1)]
    encode, *others = (signature_of(programs.program(model, bucket, LIMITS, torch.float32)) for bucket in buckets)
    for text in others:
        assert (*text.params, *encode.params) == whole.params
        assert text.state == whole.state
    assert [leaf.path for leaf in encode.state] == ["picture_pool"]
    assert set(encode.state) < set(whole.state)


def test_a_model_that_takes_no_pictures_has_no_tower(model: Model) -> None:
    whole = programs.leaves(replace(model, tower=None), replace(LIMITS, picture_rows=0), torch.float32)
    assert not [leaf for leaf in (*whole.params, *whole.state) if "vision" in leaf.path or "picture" in leaf.path]
