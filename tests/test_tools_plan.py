"""tools/plan.py: what is decided before anything is computed, and what is refused then."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from npucompile.graphs.errors import SpecError, UnknownModel
from npucompile.graphs.types import Bucket, Limits
from npucompile.models import registry
from npucompile.tools import cmd_build, plan
from npucompile.tools.plan import Options


def test_a_plan_of_a_checkpoint(tiny, tiny_checkpoint):
    made = plan.plan(Options(str(tiny_checkpoint), (1, 2, 4), (16, 4), 64, None, "float32", "eager"))
    assert made.buckets == (
        Bucket("prefill", 1, 4), Bucket("prefill", 1, 16), Bucket("decode", 1, 1), Bucket("decode", 2, 1), Bucket("decode", 4, 1),
    )  # fmt: skip
    assert made.limits == Limits(page_size=16, num_pages=1 + 4 * 4, num_slots=1 + 4, max_model_len=64)
    assert made.dtype == torch.float32
    assert made.references == ()
    assert made.notes == ()
    assert made.eos_ids == (tiny.EOS,)


def test_rows_of_large_buckets_have_a_reference_of_one_row(tiny, tiny_checkpoint):
    made = tiny.planned(tiny_checkpoint, buckets=(2, 4))
    assert made.references == (Bucket("decode", 1, 1),)
    assert not set(made.references) & set(made.buckets)


def test_bytes_are_those_of_the_real_tensors(tiny, tiny_checkpoint):
    made = tiny.planned(tiny_checkpoint)
    file = tiny_checkpoint / "model.safetensors"
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert made.params_bytes == file.stat().st_size - header
    keys_and_values = 2 * made.limits.num_pages * made.limits.page_size * 16 * 4
    recurrent = made.limits.num_slots * 2 * 8 * 8 * 4
    convolved = made.limits.num_slots * 3 * (2 * 8 + 2 * 8) * 4
    assert made.state_bytes == keys_and_values + recurrent + convolved


def test_choices_of_the_plan_are_explained(tmp_path, tiny):
    model = tiny.write_checkpoint(tmp_path / "long", max_position_embeddings=4096)
    made = plan.plan(Options(str(model), buckets=(1,), prefill=(32, 2048)))
    assert made.limits.max_model_len == 1024
    assert [bucket.q_len for bucket in made.buckets if bucket.kind == "prefill"] == [32]
    told = "\n".join(made.notes)
    assert "context 1024 of 4096 tokens" in told
    assert "--max-model-len" in told
    assert "no prefill of 2048 tokens" in told
    assert f"dtype {plan.dtype_name(made.dtype)}: " in told


def test_a_context_shorter_than_the_default_is_taken_whole(tmp_path, tiny):
    model = tiny.write_checkpoint(tmp_path / "short", max_position_embeddings=100)
    assert plan.plan(Options(str(model), dtype="float32")).limits.max_model_len == 96


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 0}, r"max_model_len is 0; legal for tiny is a multiple of 16 up to 256"),
        ({"max_model_len": 40}, r"max_model_len is 40; .*multiple of 16 up to 256"),
        ({"max_model_len": 272}, r"max_model_len is 272; .*up to 256"),
        ({"max_num_seqs": 0}, r"max_num_seqs is 0 and the largest bucket has 4 rows"),
        ({"max_num_seqs": 3}, r"max_num_seqs is 3 and the largest bucket has 4 rows; legal is at least that many"),
        ({"buckets": ()}, r"no decode buckets; legal is at least one"),
        ({"prefill": (128, 256)}, r"no prefill chunk of \(128, 256\) fits max_model_len 64; legal are sizes from 1 to 64"),
        ({"dtype": "float64"}, r"dtype is 'float64'; legal are auto, float32, bfloat16"),
    ],
)
def test_what_is_not_legal_is_refused_with_what_is(tiny, tiny_checkpoint, options, message):
    with pytest.raises(SpecError, match=message):
        tiny.planned(tiny_checkpoint, **options)


def test_more_requests_than_rows(tiny, tiny_checkpoint):
    made = tiny.planned(tiny_checkpoint, max_num_seqs=6)
    assert (made.limits.num_slots, made.limits.num_pages) == (7, 25)


def test_buckets_in_any_order_and_twice_are_one_set(tiny, tiny_checkpoint):
    assert tiny.planned(tiny_checkpoint, buckets=(4, 1, 4, 2)) == tiny.planned(tiny_checkpoint)


def test_an_unknown_model_is_named():
    with pytest.raises(UnknownModel, match=r"'qwen3\.5-tinny'.*did you mean qwen3\.5-tiny"):
        plan.plan(Options("qwen3.5-tinny"))


def test_sizes_without_weights_only_report():
    with pytest.raises(SpecError, match=r"qwen3\.5-27b is a set of sizes without weights.*--backend null"):
        plan.plan(Options("qwen3.5-27b", backend="eager"))
    made = plan.plan(Options("qwen3.5-27b", backend="null", dtype="bfloat16"))
    assert made.params_bytes > 50e9


def test_what_does_not_fit_into_memory_is_refused_before_it_is_loaded(monkeypatch, tiny, tiny_checkpoint):
    made = tiny.planned(tiny_checkpoint)
    pages = math.ceil((made.params_bytes + made.state_bytes) / 4096)
    held = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": pages}
    monkeypatch.setattr(plan.os, "sysconf", held.__getitem__)
    assert tiny.planned(tiny_checkpoint) == made
    held["SC_PHYS_PAGES"] = pages - 1
    with pytest.raises(SpecError, match=r"tiny needs .* GB for weights and .* GB for state, this machine has .* GB"):
        tiny.planned(tiny_checkpoint)
    assert tiny.planned(tiny_checkpoint, backend="null").buckets == made.buckets


@pytest.mark.parametrize(("hardware", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_takes_the_dtype_the_cpu_multiplies(monkeypatch, hardware, dtype):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: hardware)
    chosen, why = plan.choose_dtype("auto")
    assert chosen == dtype
    assert f"dtype {plan.dtype_name(dtype)}" in why
    assert plan.choose_dtype("float32") == (torch.float32, None)


def options_of(arguments):
    """What `npucompile build ARGUMENTS` asks for."""
    given = cmd_build.command.make_context("build", list(arguments)).params
    return Options(**{name: given[name] for name in Options.__dataclass_fields__})


OTHER = {"buckets": (2, 3), "prefill": (4, 5, 7), "max_num_seqs": 9, "dtype": "bfloat16", "backend": "null"}


@pytest.mark.parametrize("changes", [{}, OTHER])
def test_its_arguments_make_the_same_plan(monkeypatch, tmp_path, tiny, tiny_checkpoint, changes):
    monkeypatch.chdir(tiny_checkpoint.parent)
    made = tiny.planned("tiny", **changes)
    arguments = made.arguments
    monkeypatch.chdir(tmp_path)
    again = plan.plan(options_of(arguments))
    assert replace(again, found=made.found, model=made.model) == made
    assert again.found.checkpoint_dir.samefile(tiny_checkpoint)


def test_arguments_name_a_preset_by_its_name_and_a_directory_of_that_name_by_its_path(tmp_path, tiny):
    bundled, other = "qwen3.5-tiny", tiny.write_checkpoint(tmp_path / "qwen3.5-tiny")
    assert plan.plan(Options(bundled)).arguments[0] == bundled
    assert tiny.planned(other).arguments[0] == str(other.resolve())
    assert plan.plan(Options("qwen3.5-27b", backend="null")).arguments[0] == "qwen3.5-27b"


def test_an_end_of_text_that_can_never_be_generated_ends_nothing_and_is_mentioned(tmp_path, tiny):
    model = tiny.write_checkpoint(tmp_path / "odd", eos_token_id=[tiny.VOCAB, 7])
    made = tiny.planned(model)
    assert made.eos_ids == (7,)
    assert any(f"[{tiny.VOCAB}] lie outside the vocabulary of {tiny.VOCAB}" in note for note in made.notes)


def test_a_build_goes_where_its_name_says(tmp_path, tiny_checkpoint):
    assert plan.default_out(tmp_path, registry.find(tiny_checkpoint)) == tmp_path / "tiny"
