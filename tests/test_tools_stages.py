"""tools/stages.py: a bucket has all its stages, each says the same of itself every time."""

from __future__ import annotations

import math

import pytest

from npucompile.graphs.types import Bucket, Mesh, Rules
from npucompile.tools import stages

DECODE, PREFILL = Bucket("decode", 2, 1), Bucket("prefill", 1, 4)


def staged(made, bucket):
    return stages.stage(made, bucket, Mesh(), Rules())


@pytest.mark.parametrize("bucket", [DECODE, PREFILL], ids=lambda b: b.name)
def test_stages_are_told_apart_and_told_alike(tiny, tiny_checkpoint, bucket):
    made = tiny.planned(tiny_checkpoint)
    first, second = staged(made, bucket), staged(made, bucket)
    assert first.texts == second.texts
    assert tuple(first.texts) == stages.STAGES
    assert len(set(first.texts.values())) == 3
    for stage, text in first.texts.items():
        assert f"{bucket.name} {stage}" in text.splitlines()[0]
    assert (first.cost, first.memory) == (second.cost, second.memory)


def test_numbers_are_those_of_the_plan(tiny, tiny_checkpoint):
    made = tiny.planned(tiny_checkpoint)
    decode, prefill = tiny.stage_once(made, DECODE, Mesh(), Rules()), tiny.stage_once(made, PREFILL, Mesh(), Rules())
    for one in (decode, prefill):
        assert one.memory["params_bytes"] == made.params_bytes
        assert one.memory["state_bytes"] == made.state_bytes
        assert one.memory["inputs_bytes"] == sum(math.prod(leaf.aval.shape) * 4 for leaf in one.partitioned.signature.inputs)
        assert one.memory["peak_bytes"] > 0
        assert set(one.cost) == {"flops", "read_bytes", "write_bytes"}
    hidden, vocab = tiny.CONFIG["hidden_size"], tiny.VOCAB
    assert decode.cost["flops"] > 2 * 2 * hidden * vocab
    assert prefill.cost["flops"] > decode.cost["flops"]


def test_the_eager_form_is_always_there_and_the_target_only_beside_it(tiny, tiny_checkpoint):
    eager = tiny.stage_once(tiny.planned(tiny_checkpoint), DECODE, Mesh(), Rules())
    assert eager.target is None
    assert eager.texts["lowered"] == eager.eager.as_text()
    null = staged(tiny.planned(tiny_checkpoint, backend="null"), DECODE)
    assert null.target.backend == "null"
    assert null.eager.as_text() == eager.eager.as_text()
    assert null.texts["lowered"] == null.target.as_text()
