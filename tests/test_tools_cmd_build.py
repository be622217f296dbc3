"""tools/cmd_build.py: options become a plan, the plan is said before it is done, the artifact's path is the output."""

from __future__ import annotations

import pytest

from npucompile.graphs.types import Bucket
from npucompile.lowering.artifact import Artifact
from npucompile.tools import cmd_build

SMALL = ("--prefill", "4", "--max-model-len", "16", "--dtype", "float32", "--backend", "eager")


def test_a_checkpoint_becomes_an_artifact_of_its_name(tiny, tmp_path, tiny_checkpoint):
    result = tiny.cli(tmp_path, "build", tiny_checkpoint, "--buckets", "1,2,3", *SMALL)
    out = tmp_path / "artifacts" / "tiny"
    assert result.exit_code == 0
    assert result.stdout == f"{out}\n"
    artifact = Artifact.open(out)
    decode = [Bucket("decode", batch, 1) for batch in (1, 2, 3)]
    assert [entry.bucket for entry in artifact.manifest.graphs] == [Bucket("prefill", 1, 4), *decode]
    said = result.stderr
    assert "tiny: 4 buckets for eager (prefill-b1-q4, decode-b1-q1, decode-b2-q1, decode-b3-q1)" in said
    assert "MB of weights" in said
    assert "context 16, 3 requests in flight" in said
    assert "built in" in said
    assert "0 compiled, 0 up to date" in said


def test_out_says_where(tiny, tmp_path, tiny_checkpoint):
    result = tiny.cli(tmp_path / "home", "build", tiny_checkpoint, "--buckets", "1", *SMALL, "--out", tmp_path / "there")
    assert result.stdout == f"{tmp_path / 'there'}\n"
    Artifact.open(tmp_path / "there")
    assert not (tmp_path / "home" / "artifacts").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--buckets", "4,2"), "--buckets: buckets '4,2': 2 does not increase on 4."),
        (("--prefill", "a"), "--prefill: buckets 'a': 'a' is neither '...' nor a whole number"),
        (("--max-model-len", "17"), "max_model_len is 17; legal for tiny is a multiple of 16 up to 256"),
        (("--buckets", "1,2", "--max-num-seqs", "1"), "max_num_seqs is 1 and the largest bucket has 2 rows"),
    ],
)
def test_what_is_not_legal_is_said_with_the_rule(tiny, tmp_path, tiny_checkpoint, arguments, said):
    assert said in tiny.refused(tmp_path, "build", tiny_checkpoint, *arguments, "--backend", "eager")
    assert not (tmp_path / "artifacts").exists()


def test_the_notation_of_buckets_is_explained_where_it_is_refused_and_in_help(tiny, tmp_path, tiny_checkpoint):
    refusal = tiny.refused(tmp_path, "build", tiny_checkpoint, "--buckets", "2,...,9")
    help_text = tiny.cli(tmp_path, "build", "--help").stdout
    for text in (refusal, help_text):
        assert "unless the last three are in constant ratio" in " ".join(text.split())


@pytest.mark.parametrize(("model", "said"), [("qwen9", "'qwen9' is neither a preset nor a directory"), ("qwen3.5-27b", "--backend null")])
def test_what_is_no_model_is_named(tiny, tmp_path, model, said):
    assert said in tiny.refused(tmp_path, "build", model)


def test_a_place_that_cannot_be_written_is_named(tiny, tmp_path, tiny_checkpoint):
    (tmp_path / "file").write_text("")
    said = tiny.refused(tmp_path, "build", tiny_checkpoint, "--buckets", "1", *SMALL, "--out", tmp_path / "file" / "out")
    assert str(tmp_path / "file") in said


def test_the_plan_says_why(tiny, tmp_path):
    model = tiny.write_checkpoint(tmp_path / "long", max_position_embeddings=5000)
    lines = cmd_build.plan_lines(tiny.planned(model, max_model_len=None))
    assert lines[0].startswith("long: 5 buckets for eager (prefill-b1-q4,")
    assert lines[1].endswith("context 1024, 4 requests in flight")
    assert "context 1024 of 5000 tokens" in lines[2]
