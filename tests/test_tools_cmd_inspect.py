"""tools/cmd_inspect.py: what an artifact holds, as a table, as JSON, and as graph text."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from npucompile.lowering.artifact import Artifact
from npucompile.tools.stages import STAGES

NAMES = ["prefill-b1-q4", "prefill-b1-q16", "decode-b1-q1", "decode-b2-q1", "decode-b4-q1"]


def told(tiny, tmp_path, *arguments):
    return json.loads(tiny.cli(tmp_path, "inspect", *arguments, "--json").stdout)


def test_json_has_every_bucket(tiny, tmp_path, tiny_artifact, tiny_checkpoint):
    made = tiny.planned(tiny_checkpoint)
    artifact = Artifact.open(tiny_artifact)
    everything = told(tiny, tmp_path, tiny_artifact)
    assert [bucket["name"] for bucket in everything["buckets"]] == NAMES
    for bucket, entry in zip(everything["buckets"], artifact.manifest.graphs, strict=True):
        assert (bucket["kind"], bucket["batch"], bucket["q_len"]) == (entry.bucket.kind, entry.bucket.batch, entry.bucket.q_len)
        assert bucket["backend"] == "eager"
        assert len(bucket["digest"]) == 64
        assert set(bucket["cost"]) == {"flops", "read_bytes", "write_bytes"}
        assert bucket["cost"]["flops"] > 0
        assert bucket["memory"]["params_bytes"] == made.params_bytes
        assert bucket["collectives"] == []
    assert len({bucket["digest"] for bucket in everything["buckets"]}) == len(NAMES)
    assert everything["artifact"] == str(tiny_artifact)
    assert everything["digest"] == artifact.digest
    assert everything["model"]["name"] == "tiny"
    assert everything["model"]["config"] == tiny.CONFIG
    assert (everything["dtype"], everything["mesh"], everything["target"]) == ("f32", "1", "eager")
    assert everything["limits"]["max_model_len"] == tiny.CONTEXT
    assert everything["memory"]["params_bytes"] == made.params_bytes
    assert everything["memory"]["state_bytes"] == made.state_bytes
    assert everything["memory"]["peak_bytes"] == max(bucket["memory"]["peak_bytes"] for bucket in everything["buckets"])
    assert everything["toolchain"]["torch"]


@pytest.mark.parametrize(("asked", "name"), [("4", "decode-b4-q1"), ("1", "decode-b1-q1"), ("prefill-b1-q16", "prefill-b1-q16")])
def test_one_bucket_is_named_by_name_or_decode_batch(tiny, tmp_path, tiny_artifact, asked, name):
    assert [bucket["name"] for bucket in told(tiny, tmp_path, tiny_artifact, "--bucket", asked)["buckets"]] == [name]


@pytest.mark.parametrize("asked", ["3", "16", "decode-b4", ""])
def test_an_unknown_bucket_is_named_beside_what_there_is(tiny, tmp_path, tiny_artifact, asked):
    said = tiny.refused(tmp_path, "inspect", tiny_artifact, "--bucket", asked)
    assert f"no bucket {asked!r}; the artifact has {', '.join(NAMES)}" in said


def test_stages_are_printed_as_they_were_stored(tiny, tmp_path, tiny_artifact):
    texts = {stage: tiny.cli(tmp_path, "inspect", tiny_artifact, "--bucket", "4", "--stage", stage).stdout for stage in STAGES}
    for stage, text in texts.items():
        assert f"decode-b4-q1 {stage}" in text.splitlines()[0]
        assert "paged_attention" in text
    assert len(set(texts.values())) == 3


def test_a_stage_is_one_graphs(tiny, tmp_path, tiny_artifact):
    assert "name it with --bucket, one of prefill-b1-q4" in tiny.refused(tmp_path, "inspect", tiny_artifact, "--stage", "lowered")
    assert tiny.cli(tmp_path, "inspect", tiny_artifact, "--bucket", "4", "--stage", "compiled").exit_code == 2


def test_the_table_is_for_reading(tiny, tmp_path, own_artifact):
    lines = tiny.cli(tmp_path, "inspect").stdout.splitlines()
    assert lines[0].startswith("tiny (qwen3_5) for eager, f32, mesh 1 ")
    assert lines[0].endswith(str(own_artifact))
    assert lines[1] == "context 64, 16 pages of 16 tokens, 4 state slots"
    assert lines[2].startswith("memory: weights 0.2 MB, state 0.0 MB, activations at most 0.0 MB")
    assert [line.split()[0] for line in lines[6:]] == NAMES
    assert all(line.split()[1] == "eager" for line in lines[6:])
    assert all(" - " in line for line in lines[6:])


def test_a_proof_is_shown(tiny, tmp_path, own_artifact):
    def prove(manifest, _):
        return replace(manifest, graphs=tuple(replace(entry, verified={"logits_error": 2.5e-6}) for entry in manifest.graphs))

    tiny.published(own_artifact, prove)
    assert tiny.cli(tmp_path, "inspect", "tiny").stdout.count("2.5e-06") == len(NAMES)


def test_a_tampered_file_is_refused_by_its_name(tiny, own_artifact, tmp_path):
    for name in tiny.contents(own_artifact):
        with tiny.damaged(own_artifact / name):
            assert str(own_artifact / name) in tiny.refused(tmp_path, "inspect", "tiny")


def test_what_was_built_elsewhere_can_still_be_looked_at(tiny, own_artifact, tmp_path):
    tiny.with_compiled(own_artifact, toolchain={"torch": "2.0.0"})
    assert told(tiny, tmp_path, "tiny")["toolchain"] == {"torch": "2.0.0"}


def test_nothing_to_inspect_is_said(tiny, tmp_path):
    assert "`npucompile build MODEL` makes one" in tiny.refused(tmp_path, "inspect")
