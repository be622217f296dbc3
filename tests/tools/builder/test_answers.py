"""tools/builder/answers.py: defaults of builds for NPUs, each with the figure that decided it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import tiny

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.tools.builder import answers, pool
from npucompile.tools.builder.explanation import explanation
from npucompile.tools.builder.plan import Options, plan
from npucompile.tools.builder.rank_memory import partitioned_memory
from npucompile.tools.inspection.cost import step_cost


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are priced again, or built, are not lowered again."""
    for module in (answers, pool):
        monkeypatch.setattr(module, "run", tiny.compile_once)


ROW = "qwen35-397b-a3x8-in3k5-out1k5-50ms"


def unpriced(model: str, path: Path, **options: Any) -> Any:
    """The answered plan of a build of two NPUs that lowers nothing."""
    return answers.answer(plan(Options(model, target="ascend-a3", mesh="tp=2", backend="null", **options)), answers.Priced(path))


def test_a_small_model_has_its_whole_context_and_a_large_one_what_memory_takes(tmp_path: Path) -> None:
    """By the memory plan with graphs: what was chosen fits beside the spare part, and twice of it does not."""
    small = unpriced("qwen3-0.6b", tmp_path, buckets=(1, 4))
    assert small.limits.max_model_len == small.source.max_position_embeddings == 40960
    large = unpriced("qwen3.5-27b", tmp_path, buckets=(1, 16))
    length, states = large.limits.max_model_len, large.limits.checkpoint_slots
    assert length.bit_count() == 1
    assert 4096 < length < large.source.max_position_embeddings
    assert (large.limits.num_pages - 1, states) == (16 * length // 128, 16)
    for context, fits in ((length, True), (2 * length, False)):
        found = partitioned_memory(plan(replace(large.options, max_model_len=context)))
        assert (found.total_bytes <= found.limit_bytes - found.limit_bytes // answers.SPARE) is fits
    note = next(note for note in large.notes if note.startswith(f"max-model-len {length}: 16 requests of {length} tokens take "))
    assert note.endswith("the model takes 262144. (--max-model-len to change)")


def test_what_options_say_stays(tmp_path: Path) -> None:
    made = unpriced("qwen3.5-0.8b", tmp_path, buckets=(2,), max_model_len=8192)
    assert (made.limits.max_model_len, made.limits.checkpoint_slots, list(dict(made.reasons))) == (8192, 2, ["checkpoint-slots"])
    asked = {"max_model_len": 8192, "checkpoint_slots": 0}
    assert unpriced("qwen3.5-0.8b", tmp_path, buckets=(2,), **asked) == plan(
        Options("qwen3.5-0.8b", target="ascend-a3", mesh="tp=2", backend="null", buckets=(2,), **asked)
    )
    bounded = unpriced("qwen3-0.6b", tmp_path, buckets=(2,), max_total_tokens=6144)
    assert (bounded.limits.max_model_len, bounded.limits.num_pages, bounded.reasons) == (4096, 49, ())
    here = plan(Options("qwen3-0.6b", backend="null"))
    assert answers.answer(here, answers.Priced(tmp_path)) is here


def test_where_not_even_the_default_leaves_a_spare_part_states_are_fewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "SPARE", 1)
    made = unpriced("qwen3.5-0.8b", tmp_path, buckets=(2,))
    assert (made.limits.max_model_len, made.limits.checkpoint_slots) == (4096, 0)
    assert dict(made.reasons)["max-model-len"].startswith("It is the least: twice of it for 2 requests takes ")


def test_a_deployment_keeps_its_sizes_and_takes_its_pictures(tmp_path: Path) -> None:
    options = Options("qwen3.5-397b", deployment=ROW, backend="null")
    row = plan(options)
    made = answers.answer(row, answers.Priced(tmp_path))
    assert made.limits == replace(row.limits, picture_rows=made.limits.picture_rows)
    assert [bucket.name for bucket in made.buckets[:3]] == ["encode-b1-q256", "encode-b1-q1024", "encode-b1-q4096"]
    assert made.buckets[3:] == row.buckets
    assert (dict(made.decided_by)["encode"], dict(made.decided_by)["max-model-len"]) == ("plan", "row")
    assert ROW in dict(made.reasons)["encode"]
    assert not any("text alone" in note for note in made.notes)
    text = plan(replace(options, language_model_only=True))
    assert answers.answer(text, answers.Priced(tmp_path)) == text
    for each in (made, text):
        repeated = answers.answer(plan(tiny.options_of(each.arguments)), answers.Priced(tmp_path))
        assert (repeated.buckets, repeated.reasons, repeated.arguments) == (each.buckets, each.reasons, each.arguments)
    split = plan(Options("qwen3.5-397b", deployment="qwen35-397b-a3x24-pd-1p1d-3node", phase="decode", backend="null"))
    assert answers.answer(split, answers.Priced(tmp_path)) == split


MS = {1: 55.0, 2: 60.0, 4: 100.0}
"""What steps are taken to cost, by width: of half of their drafts accepted those of 2 give 25 tokens a second, of 4 18.8, of 1 18.2."""


def widened(monkeypatch: pytest.MonkeyPatch, path: Path, model: str, **options: Any) -> Any:
    monkeypatch.setattr(answers.Priced, "step_ms", lambda self, plan, bucket: MS[bucket.q_len])
    monkeypatch.setattr(answers, "_fit", lambda plan: plan)
    own = {"buckets": (8, 120), "max_logprobs": 0, "logit_adjustments": 0, **options}
    return answers.answer(plan(Options(model, target="ascend-a3", mesh="tp=4", **own)), answers.Priced(path))


def test_narrower_steps_are_built_where_they_give_more_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eagle = {"draft_model": "qwen3-32b-eagle3"}
    made = widened(monkeypatch, tmp_path, "qwen3-32b", **eagle)
    assert [bucket.name for bucket in made.buckets[-4:]] == ["decode-b8-q2", "decode-b8-q4", "decode-b120-q2", "decode-b120-q4"]
    steps = "a step of 2 60.0 ms for 1.50 tokens, a step of 4 100.0 ms for 1.88 tokens"
    why = f"By the cost model 120 requests take, with 50% of drafts accepted, {steps}."
    assert (dict(made.reasons), dict(made.decided_by)["draft-widths"]) == ({"draft-widths": why}, "plan")
    assert plan(tiny.options_of(made.arguments)).buckets == made.buckets
    # Who says widths has them; recurrent states take one alone, and without drafts there is one.
    for model, options in (("qwen3-32b", {**eagle, "draft_widths": (4,)}), ("qwen3.5-27b", {}), ("qwen3-32b", {})):
        alone = widened(monkeypatch, tmp_path, model, **options)
        assert len({bucket.q_len for bucket in alone.buckets if bucket.kind == "decode"}) == 1
        assert alone.reasons == ()


def test_answers_are_taken_where_they_are_cheap(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figure is that of `inspect --cost` of two artifacts, with the answer and without it."""
    options = Options(str(model), target="ascend-a3", mesh="tp=2", buckets=(2,), prefill=(tiny.PrefillSize(16),), max_model_len=256)
    costs: dict[int, float] = {}
    for most, counts in ((10.0, (20, 8)), (0.0, (0, 0))):
        monkeypatch.setattr(answers, "MOST_SHARE", most)
        made = answers.answer(plan(options), answers.Priced(tmp_path / "cache"))
        assert (made.max_logprobs, made.limits.logit_adjustments) == counts
        without = replace(made.options, max_logprobs=0, logit_adjustments=0)
        for count in {0, 20} - costs.keys():
            tiny.built(plan(replace(without, max_logprobs=count)), tmp_path / str(count))
            artifact = Artifact.open(tmp_path / str(count))
            (entry,) = (entry for entry in artifact.manifest.graphs if entry.bucket.name == "decode-b2-q4")
            costs[count], built = step_cost(artifact, entry).step_ms, without
        assert without == built
        reason = dict(made.reasons)["max-logprobs"]
        assert f" {costs[20] / costs[0] - 1:.2%} of the {costs[0]:.1f} ms of decode-b2-q4" in reason
        assert ("would cost" in reason) is (most == 0.0)


def test_a_build_says_what_it_chose_and_explain_says_why(tmp_path: Path, model: Path) -> None:
    words = ["--target", "ascend-a3", "--mesh", "tp=2", "--buckets", "1", "--prefill", "16", "--precompile", "none", "--jobs", "1"]
    result = tiny.cli(tmp_path, "build", model, *words, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    manifest = Artifact.open(tmp_path / "out").manifest
    assert set(manifest.reasons) == {"checkpoint-slots", "max-logprobs", "logit-adjustments"}
    explained = {setting.name: setting for setting in explanation(manifest)}
    for name, why in manifest.reasons.items():
        assert re.search(rf"  {name} \d+: {re.escape(why)} \(--{name} to change\)", result.stderr)
        assert explained.get(name) is None or (explained[name].by, explained[name].why) == ("plan", why)
    assert explained["checkpoint-slots"].value == "1"
    # Its arguments lead to the same plan, for the same reasons.
    repeated = answers.answer(plan(tiny.options_of(manifest.build_arguments)), answers.Priced(tmp_path))
    assert (repeated.limits, repeated.arguments) == (manifest.limits, manifest.build_arguments)
    assert (dict(repeated.decided_by), dict(repeated.reasons)) == (manifest.decided_by, manifest.reasons)
