"""tools/builder/stages.py: a bucket passes all stages, with the same text every time."""

from __future__ import annotations

import math

import pytest
from support import tiny

from npucompile.graphs.types import Bucket
from npucompile.tools.builder import stages

DECODE, PREFILL = Bucket("decode", 2, 4), Bucket("prefill", 1, 4)


@pytest.mark.parametrize("bucket", [DECODE, PREFILL], ids=lambda b: b.name)
def test_stages_are_told_apart_and_told_alike(tiny_checkpoint, bucket):
    plan = tiny.planned(tiny_checkpoint)
    first, second = stages.stage(plan, bucket), stages.stage(plan, bucket)
    assert first.texts == second.texts
    assert set(first.texts) == set(stages.STAGES)
    assert len(set(first.texts.values())) == 3
    for stage, text in first.texts.items():
        assert f"{bucket.name} {stage}" in text.splitlines()[0]
    assert (first.partitioned.cost(), first.partitioned.memory()) == (second.partitioned.cost(), second.partitioned.memory())


def test_numbers_are_those_of_the_plan(tiny_checkpoint):
    plan = tiny.planned(tiny_checkpoint)
    decode, prefill = tiny.stage_once(plan, DECODE), tiny.stage_once(plan, PREFILL)
    for staged in (decode, prefill):
        memory = staged.partitioned.memory()
        assert (memory.params_bytes, memory.state_bytes) == (plan.params_bytes, plan.state_bytes)
        assert memory.inputs_bytes == sum(math.prod(leaf.aval.shape) * 4 for leaf in staged.partitioned.signature.inputs)
        assert memory.peak_bytes > 0
    hidden, vocab = tiny.CONFIG["hidden_size"], tiny.VOCAB
    # Of two requests with four candidates each, and three drafts.
    assert decode.partitioned.cost().flops > 2 * 2 * (4 + 3) * hidden * vocab
    assert tiny.stage_once(plan, Bucket("prefill", 1, 16)).partitioned.cost().flops > prefill.partitioned.cost().flops


def test_a_bucket_is_lowered_for_the_backend_of_the_plan(tiny_checkpoint):
    for name in ("eager", "null"):
        staged = stages.stage(tiny.planned(tiny_checkpoint, backend=name), DECODE)
        assert staged.lowered.backend == name
        assert staged.texts["lowered"] == staged.lowered.as_text()


def test_on_a_mesh_each_stage_is_one_ranks_and_no_whole_graph_is_traced(tiny_checkpoint):
    plan = tiny.planned(tiny_checkpoint, mesh="dp=2,tp=1")
    staged = stages.stage(plan, DECODE)
    assert set(staged.texts) == {"partitioned", "lowered"}
    assert "over mesh dp=2,tp=1" in staged.texts["partitioned"].splitlines()[0]
    assert staged.partitioned.signature.inputs[-1].name == "inputs.coords"
    assert {group for _, group, _ in staged.partitioned.collectives} <= {"dp", "tp", "world"}
    assert staged.partitioned.memory().params_bytes == plan.params_bytes < tiny.planned(tiny_checkpoint).params_bytes


def test_what_is_for_npus_gives_no_logits(tmp_path):
    plan = tiny.planned_device(tiny.write_checkpoint(tmp_path / "model", **tiny.NPU_SIZES), backend="null")
    staged = stages.stage(plan, plan.buckets[-1])
    assert staged.texts["lowered"] == staged.lowered.as_text()
    assert {leaf.name for leaf in staged.partitioned.signature.outputs} == {"outputs.tokens", "outputs.counts", "outputs.drafts"}
    assert staged.partitioned.memory().state_bytes == plan.state_bytes


def test_a_bucket_is_partitioned_as_it_is_staged(tiny_checkpoint):
    plan = tiny.planned(tiny_checkpoint)
    traced, partitioned = stages.partition_bucket(plan, DECODE)
    staged = tiny.stage_once(plan, DECODE)
    assert traced is not None
    assert partitioned.signature == staged.partitioned.signature
    assert stages.partition_bucket(tiny.planned(tiny_checkpoint, mesh="dp=2"), DECODE)[0] is None
