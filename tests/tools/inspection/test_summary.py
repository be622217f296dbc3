"""tools/inspection/summary.py: an artifact as a table, as JSON and as graph text."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace

import pytest
from support import tiny

from npucompile.graphs.types import Limits
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.lowering.artifact.manifest import ExecutableRecord
from npucompile.lowering.ascend.ge_file import GeFile, encode, messages
from npucompile.tools.builder.memory import GIB, MemoryPlan, MemoryShare
from npucompile.tools.builder.stages import STAGES
from npucompile.tools.inspection import cost, summary

NAMES = ["prefill-b1-q4", "prefill-b1-q16", "decode-b1-q4", "decode-b2-q4", "decode-b4-q4"]


def told(tmp_path, *arguments):
    return json.loads(tiny.cli(tmp_path, "inspect", *arguments, "--json").stdout)


def test_json_has_every_bucket(tmp_path, tiny_artifact, tiny_checkpoint):
    plan = tiny.planned(tiny_checkpoint)
    artifact = Artifact.open(tiny_artifact)
    everything = told(tmp_path, tiny_artifact)
    assert [bucket["name"] for bucket in everything["buckets"]] == NAMES
    for bucket, entry in zip(everything["buckets"], artifact.manifest.graphs, strict=True):
        assert (bucket["kind"], bucket["batch"], bucket["q_len"]) == (entry.bucket.kind, entry.bucket.batch, entry.bucket.q_len)
        assert bucket["backend"] == "eager"
        assert len(bucket["digest"]) == 64
        assert set(bucket["cost"]) == {"flops", "cached_flops", "read_bytes", "write_bytes"}
        assert bucket["cost"]["flops"] > 0
        assert bucket["memory"]["params_bytes"] == plan.params_bytes
        assert bucket["collectives"] == []
    assert len({bucket["digest"] for bucket in everything["buckets"]}) == len(NAMES)
    assert everything["artifact"] == str(tiny_artifact)
    assert everything["digest"] == artifact.digest
    assert everything["model"]["name"] == "tiny"
    assert everything["model"]["config"] == tiny.CONFIG
    assert (everything["dtype"], everything["mesh"], everything["target"]) == ("f32", "1", "cpu")
    assert everything["limits"]["max_model_len"] == tiny.CONTEXT
    assert everything["memory"]["params_bytes"] == plan.params_bytes
    assert everything["memory"]["state_bytes"] == plan.state_bytes
    assert everything["memory"]["peak_bytes"] == max(bucket["memory"]["peak_bytes"] for bucket in everything["buckets"])
    assert everything["toolchain"]["torch"]
    assert (everything["limits"]["drafts"], everything["limits"]["slots_per_request"], everything["max_logprobs"]) == (3, 4, 20)
    decode, prefill = everything["buckets"][-1], everything["buckets"][0]
    assert (decode["inputs"]["page_table"], decode["inputs"]["uniform"]) == ("i32[4,4]", "f32[4,7]")
    assert (decode["outputs"]["tokens"], decode["outputs"]["top_logprobs"]) == ("i32[4,4]", "f32[4,4,20]")
    assert prefill["inputs"]["next_tokens"] == "i32[1]"
    assert "counts" not in prefill["outputs"]


def test_what_a_bucket_takes_and_gives_is_shown_with_it(tmp_path, tiny_artifact):
    lines = tiny.cli(tmp_path, "inspect", tiny_artifact, "--bucket", "2").stdout.splitlines()
    assert lines[-3] == ""
    assert lines[-2].startswith("inputs   drafts i32[2], base i32[2], request_slots i32[2], page_table i32[2,4], ")
    assert lines[-1].endswith("counts i32[2], drafts i32[2,3]")


def test_without_drafts_that_is_said(tmp_path, tiny_checkpoint):
    none = {"num_speculative_tokens": 0, "max_logprobs": 0}
    tiny.built(tiny.planned(tiny_checkpoint, buckets=(1,), prefill=(4,), **none), tmp_path / "artifacts" / "plain")
    lines = tiny.cli(tmp_path, "inspect").stdout.splitlines()
    assert lines[1] == "context 64, 4 pages of 16 tokens, 1 state slots, requests in flight: 1"
    assert lines[2] == "drafts a step: 0; log probabilities: none"


@pytest.mark.parametrize(("wanted", "name"), [("4", "decode-b4-q4"), ("1", "decode-b1-q4"), ("prefill-b1-q16", "prefill-b1-q16")])
def test_one_bucket_is_named_by_name_or_decode_batch(tmp_path, tiny_artifact, wanted, name):
    assert [bucket["name"] for bucket in told(tmp_path, tiny_artifact, "--bucket", wanted)["buckets"]] == [name]


@pytest.mark.parametrize("wanted", ["3", "16", "decode-b4", ""])
def test_an_unknown_bucket_is_named_beside_what_there_is(tmp_path, tiny_artifact, wanted):
    message = tiny.refused(tmp_path, "inspect", tiny_artifact, "--bucket", wanted)
    assert f"no bucket {wanted!r}; the artifact has {', '.join(NAMES)}" in message


def test_stages_are_printed_as_they_were_stored(tmp_path, tiny_artifact):
    texts = {stage: tiny.cli(tmp_path, "inspect", tiny_artifact, "--bucket", "4", "--stage", stage).stdout for stage in STAGES}
    for stage, text in texts.items():
        assert f"decode-b4-q4 {stage}" in text.splitlines()[0]
        assert "paged_attention" in text
    assert len(set(texts.values())) == 3


def test_the_table_is_for_reading(tmp_path, own_artifact):
    lines = tiny.cli(tmp_path, "inspect").stdout.splitlines()
    assert lines[0].startswith("tiny (qwen3_5) for cpu, f32, mesh 1 ")
    assert lines[0].endswith(str(own_artifact))
    assert lines[1] == "context 64, 16 pages of 16 tokens, 16 state slots, requests in flight: 4"
    assert lines[2] == "drafts a step: 3; log probabilities: of up to 20 most likely tokens"
    assert lines[3].startswith("memory: weights 0.2 MB, state 0.1 MB, activations at most 0.1 MB")
    assert [line.split()[0] for line in lines[7:]] == NAMES
    assert all(line.split()[1] == "eager" for line in lines[7:])
    assert all(" - " in line for line in lines[7:])


def test_a_proof_is_shown(tmp_path, own_artifact):
    def prove(manifest, _):
        return replace(manifest, graphs=tuple(replace(entry, verified={"logits_error": 2.5e-6}) for entry in manifest.graphs))

    tiny.published(own_artifact, prove)
    assert tiny.cli(tmp_path, "inspect", "tiny").stdout.count("2.5e-06") == len(NAMES)


def test_what_was_built_elsewhere_can_still_be_looked_at(own_artifact, tmp_path):
    tiny.with_compiled(own_artifact, toolchain={"torch": "2.0.0"})
    assert told(tmp_path, "tiny")["toolchain"] == {"torch": "2.0.0"}


# --- artifacts for NPUs ---


TALKS = (("all_reduce", "tp", "bf16[4,64]"), ("all_reduce", "tp", "bf16[4,64]"))
PLAN = MemoryPlan("ascend-a3", "dp=2,tp=2", (MemoryShare("weights", 3 * GIB, "all of them"),), 64 * GIB, 1, 1, 1, Limits(128, 2, 2, 128))


@pytest.fixture
def npu(own_artifact):
    """The tiny artifact, told to be one for NPUs; its graphs are two all-reduces."""
    model = messages().ModelDef()
    ops = model.graph.add(name="main").op
    ops.add(name="x", type="Data").attr["index"].i = 0
    for i, before in enumerate(("x", "body/talk0")):
        op = ops.add(name=f"body/talk{i}", type="HcomAllReduce")
        op.input.append(f"{before}:0")
        op.attr["group"].s = b"tp"
        op.output_desc.add().attr["_meta"].s = b"bf16[4,64]"
    data = encode(GeFile(model.SerializeToString(), {}, (), (), 1, 0, ()))

    def change(manifest, writer):
        compiled = ExecutableRecord("ge", writer.add("graphs", data, "ge"), "key")
        stages = writer.add("stages", zlib.compress(json.dumps({"partitioned": "p\n", "lowered": "l\n"}).encode()), "json.z")
        changes = {"compiled": compiled, "stages": stages, "collectives": TALKS, "census": {"Data": 1, "HcomAllReduce": 2}, "eager": None}
        graphs = tuple(replace(entry, **changes) for entry in manifest.graphs)
        about = {"mesh": "dp=2,tp=2", "target": "ascend-a3", "quantization": "w4a8", "deployment": "row-1", "memory": PLAN.as_dict()}
        return replace(manifest, graphs=graphs, references=(), **about)

    tiny.published(own_artifact, change)
    return own_artifact


def test_an_artifact_for_npus_says_what_it_is_for(tmp_path, npu, monkeypatch):
    estimated = []

    def facts(_, entry):
        estimated.append(entry.bucket.name)
        return {"launches": 1234, "cost": {"step_ms": 2.5}}

    monkeypatch.setattr(cost, "bucket_facts", facts)
    lines = tiny.cli(tmp_path, "inspect").stdout.splitlines()
    assert lines[0].startswith("tiny (qwen3_5) for ascend-a3, f32, w4a8, mesh dp=2,tp=2 ")
    assert lines[1] == "deployment row-1"
    assert lines[4] == "memory of a rank: 3.0 of 64.0 GiB (--memory shows its parts)"
    # How long a step takes stands before what it computes.
    assert lines[7].split()[:5] == ["bucket", "backend", "ms", "launches", "MFLOP"]
    assert [line.split()[:4] for line in lines[8:-2]] == [[name, "ge", "2.50", "1,234"] for name in NAMES]
    assert lines[-1] == "ms and launches are estimates of a step: --cost says where they go"
    monkeypatch.setattr(summary, "ESTIMATED", 2)
    estimated.clear()
    lines = tiny.cli(tmp_path, "inspect").stdout.splitlines()
    assert 1 <= len(estimated) <= 2
    assert f", of {len(estimated)} of {len(NAMES)} buckets: --cost" in lines[-1]
    monkeypatch.undo()
    everything = told(tmp_path)
    assert (everything["deployment"], everything["quantization"]) == ("row-1", "w4a8")
    assert everything["buckets"][0]["census"] == {"Data": 1, "HcomAllReduce": 2}


def test_the_graph_an_npu_compiles_is_a_stage(tmp_path, npu):
    text = tiny.cli(tmp_path, "inspect", "tiny", "--bucket", "4", "--stage", "ge").stdout
    assert text == "".join(line + "\n" for line in [
        "x = Data() 0",
        "body/talk0 = HcomAllReduce(x:0) group='tp' : bf16[4,64]",
        "body/talk1 = HcomAllReduce(body/talk0:0) group='tp' : bf16[4,64]",
    ])  # fmt: skip
    as_json = told(tmp_path, "--bucket", "4", "--stage", "ge")
    assert (as_json["bucket"], as_json["stage"], as_json["text"], as_json["inputs"]) == ("decode-b4-q4", "ge", text, 1)


def test_a_stage_that_is_not_there_is_named_beside_those_that_are(tmp_path, npu, tiny_artifact):
    message = tiny.refused(tmp_path, "inspect", "tiny", "--bucket", "4", "--stage", "traced")
    assert "decode-b4-q4 has no stage 'traced' on mesh dp=2,tp=2; it has partitioned, lowered, ge" in message
    assert tiny.cli(tmp_path, "inspect", "tiny", "--bucket", "4", "--stage", "lowered").stdout == "l\n"
    assert "is not compiled; --stage ge shows" in tiny.refused(tmp_path, "inspect", tiny_artifact, "--bucket", "4", "--stage", "ge")
