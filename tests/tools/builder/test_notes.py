"""tools/builder/notes.py: what a plan chose for the user, it says."""

from __future__ import annotations

from support import tiny

from npucompile.tools.builder import plan as planning
from npucompile.tools.builder.plan import Options
from npucompile.tools.notation import PrefillSize


def test_choices_of_the_plan_are_explained(tmp_path):
    model = tiny.write_checkpoint(tmp_path / "long", max_position_embeddings=4096)
    plan = planning.plan(Options(str(model), buckets=(1,), prefill=(PrefillSize(32), PrefillSize(8192))))
    assert [bucket.q_len for bucket in plan.buckets if bucket.kind == "prefill"] == [32]
    notes = "\n".join(plan.notes)
    assert "context 4096 tokens, the model's own (--max-model-len to change)" in notes
    assert "no prefill of 8192 tokens" in notes
    assert f"dtype {str(plan.dtype).removeprefix('torch.')}: " in notes


def test_an_end_of_text_that_can_never_be_generated_ends_nothing_and_is_mentioned(tmp_path):
    model = tiny.write_checkpoint(tmp_path / "odd", eos_token_id=[tiny.VOCAB, 7])
    plan = tiny.planned(model)
    assert plan.eos_ids == (7,)
    assert "responses end at token 7 (config.json)" in plan.notes
    assert any(f"[{tiny.VOCAB}] lie outside the vocabulary of {tiny.VOCAB}" in note for note in plan.notes)


def test_a_vocabulary_that_does_not_divide_is_padded_and_said(tmp_path):
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    model = tiny.write_checkpoint(tmp_path / "model", **heads, vocab_size=261)
    planned = tiny.planned(model, mesh="tp=2")
    assert "the vocabulary of 261 is padded to 262 over 2 ranks" in planned.notes
    assert planned.model.params(planned.dtype)["embed"].aval.shape == (262, 32)
    assert planned.model.config.vocab_size == 261
    assert not any("padded" in note for note in tiny.planned(model).notes)


def test_it_is_said_which_files_name_the_ends_of_responses(tmp_path):
    model = tiny.write_checkpoint(tmp_path / "chat", eos_token_id=7)
    (model / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert "responses end at token 7 (generation_config.json and config.json), 9 (generation_config.json)" in tiny.planned(model).notes
    silent = tiny.write_checkpoint(tmp_path / "silent", eos_token_id=None)
    assert any(note.startswith("no file names a token that ends responses") for note in tiny.planned(silent).notes)
    assert not any("end" in note for note in tiny.planned("qwen3.5-27b", backend="null").notes)


def test_a_checkpoint_that_no_server_takes_text_of_is_mentioned(tmp_path):
    """Its server ends where it starts, and its artifact is of use all the same."""
    bare = tiny.write_checkpoint(tmp_path / "bare", tokenizer=False)
    assert any(note.startswith("the checkpoint has no tokenizer.json") for note in tiny.planned(bare).notes)
    assert not any("tokenizer.json" in note for note in tiny.planned(tiny.write_checkpoint(tmp_path / "whole")).notes)
