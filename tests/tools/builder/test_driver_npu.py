"""tools/builder/driver.py, for NPUs: builds for NPUs: the content of an artifact, and what is built again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support import modelslim, tiny

from npucompile.graphs.errors import LoweringError
from npucompile.lowering import collectives_check
from npucompile.lowering.artifact.artifact import MANIFEST, Artifact
from npucompile.lowering.ascend.ge_file import decode
from npucompile.lowering.toolchain import differences
from npucompile.models.quant.description import formats_in
from npucompile.models.quant.formats import Formats
from npucompile.tools.builder import derived, driver, memory, pool, stages, stamp
from npucompile.tools.builder.environment import environment
from npucompile.tools.builder.memory import MemoryPlan

NAMES = ["prefill-b1-q4", "decode-b2-q2", "decode-b4-q2"]
ORDER = ["decode-b4-q2", "prefill-b1-q4", "decode-b2-q2"]
"""The largest first."""
_run = pool.run


@pytest.fixture
def plan(model):
    return tiny.planned_device(model)


@pytest.fixture
def lowered(monkeypatch):
    """Names of buckets that were lowered, in order; the same bucket is lowered once in all tests."""
    names = []

    def run(job):
        names.append(job.bucket.name)
        return tiny.compile_once(job)

    monkeypatch.setattr(pool, "run", run)
    return names


def stamp_of(plan, bucket):
    return stamp.bucket_stamp(*driver.facts(plan, bucket))


@pytest.fixture
def build(tmp_path):
    def built(plan, name="out", jobs=1, made=()):
        return driver.build(plan, tmp_path / name, tmp_path / "cache", tiny.QUIET, jobs=jobs, made=made)

    return built


def test_it_carries_the_plan_of_a_ranks_memory(plan, lowered, build, tmp_path):
    build(plan)
    manifest = Artifact.open(tmp_path / "out").manifest
    planned = MemoryPlan.from_dict(manifest.memory)
    parts = {part.name: part.nbytes for part in planned.parts}
    weights = parts["expert weights"] + parts["other weights"] + parts["draft head"]
    assert weights == plan.params_bytes == manifest.graphs[0].memory["params_bytes"]
    assert parts["KV pages"] + parts["state slots"] + parts["request slots"] == plan.state_bytes == manifest.graphs[0].memory["state_bytes"]
    head = sum(memory.local_bytes(leaf.aval, plan.mesh, plan.rules()) for leaf in manifest.params if leaf.name.startswith("params.mtp."))
    assert parts["draft head"] == head > 0
    assert parts["activations"] == max(entry.memory["peak_bytes"] for entry in manifest.graphs)
    assert parts["inputs"] == max(sum(leaf.aval.nbytes for leaf in (*e.inputs, *e.outputs)) for e in manifest.graphs)
    assert planned.fits
    assert manifest.memory["fits"] is True
    assert planned.as_dict() == manifest.memory
    # The graphs gather and scatter over tp; dispatch has a communicator of its own, and nothing else is over all ranks.
    assert set(manifest.communicator_bytes) == {"tp", "dispatch"}
    communication = next(part for part in planned.parts if part.name == "communication")
    assert communication.nbytes == sum(2 * nbytes for nbytes in manifest.communicator_bytes.values())
    assert manifest.environment == environment(plan.target, plan.mesh, manifest.communicator_bytes)


def test_an_artifact_has_a_graph_for_all_ranks_a_bucket_and_one_file_of_weights(model, plan, lowered, build, tmp_path):
    report = build(plan)
    assert lowered == ORDER
    assert (sorted(report.compiled), report.reused, report.path) == (sorted(NAMES), (), tmp_path / "out")
    artifact = Artifact.open(tmp_path / "out")
    manifest = artifact.manifest
    assert (manifest.target, manifest.mesh, manifest.quantization, manifest.deployment) == ("ascend-a3", "dp=2,tp=2", "none", "")
    assert set(load_file(artifact.path / manifest.weights)) == {leaf.name for leaf in manifest.params}
    assert (artifact.path / manifest.tokenizer).read_bytes() == (model / "tokenizer.json").read_bytes()
    assert (manifest.checkpoint, manifest.references) == (None, ())
    assert manifest.rules["experts"] == ("dp", "tp")
    assert manifest.build_arguments == plan.arguments
    assert differences(manifest.toolchain) == []
    assert manifest.toolchain["torch_npu"]
    assert [entry.bucket.name for entry in manifest.graphs] == NAMES
    for entry in manifest.graphs:
        assert (entry.eager, entry.backend, entry.verified) == (None, "ge", {})
        ge_file = decode((artifact.path / entry.compiled.file).read_bytes())
        assert entry.compiled.file.endswith(".ge")
        assert collectives_check.of_ge_file(ge_file) == entry.collectives
        assert entry.inputs[-1].name == "inputs.coords"
        assert ge_file.inputs == len(manifest.signature(entry).operands)
        # Four layers and the draft head.
        assert entry.census["MoeDistributeDispatchV2"] == 5
        assert set(stages.unpack_texts((artifact.path / entry.stages).read_bytes())) == {"partitioned", "lowered"}
        assert entry.cost["flops"] > 0
    assert set(manifest.files) | {MANIFEST} == set(tiny.contents(artifact.path))


def test_nothing_changed_is_nothing_lowered_and_not_a_byte_written_anew(plan, lowered, build, tmp_path):
    build(plan)
    before = tiny.contents(tmp_path / "out")
    lowered.clear()
    report = build(plan)
    assert lowered == []
    assert (report.compiled, list(report.reused)) == ({}, NAMES)
    assert tiny.contents(tmp_path / "out") == before
    assert list((tmp_path / "cache" / "unfinished").iterdir()) == []
    assert [file.name for file in (tmp_path / "cache").iterdir() if file.name.startswith("build-")] == []


def test_one_bucket_more_is_one_lowered_and_one_less_is_none(model, plan, lowered, build, tmp_path):
    build(plan)
    lowered.clear()
    more = tiny.planned_device(model, buckets=(2, 3, 4))
    report = build(more)
    assert lowered == ["decode-b3-q2"]
    assert sorted(report.reused) == sorted(NAMES)
    lowered.clear()
    build(tiny.planned_device(model, buckets=(3,)))
    assert lowered == []
    artifact = Artifact.open(tmp_path / "out")
    assert [entry.bucket.name for entry in artifact.manifest.graphs] == ["prefill-b1-q4", "decode-b3-q2"]
    assert set(tiny.contents(artifact.path)) == {*artifact.manifest.files, MANIFEST}


@pytest.mark.long
def test_it_is_the_same_bytes_in_another_process_and_another_place(model, plan, lowered, build, tmp_path, monkeypatch):
    """Processes of a pool of two, which order their sets otherwise, against this one."""
    small = tiny.planned_device(model, prefill=(4,), buckets=(2,))
    build(small)
    monkeypatch.undo()
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    driver.build(small, tmp_path / "far" / "away", tmp_path / "other", tiny.QUIET, jobs=2)
    here, there = tiny.contents(tmp_path / "out"), tiny.contents(tmp_path / "far" / "away")
    assert list(here) == list(there)
    assert [name for name in here if here[name] != there[name]] == []


@pytest.mark.parametrize(
    ("changes", "again"),
    [
        ({"max_num_seqs": 5}, True),
        ({"max_model_len": 384}, True),
        ({"num_speculative_tokens": 2}, True),
        ({"mesh": "dp=4,tp=1"}, True),
        ({"quantization": "w8a8"}, True),
        ({"target": "ascend-a2"}, True),
        ({"backend": "null"}, True),
        ({}, False),
        ({"prefill": (4, 8)}, False),
    ],
)
def test_the_key_of_a_bucket_is_all_that_decides_it(model, plan, changes, again):
    changed = tiny.planned_device(model, **changes)
    last, changed_bucket = plan.buckets[-1], changed.buckets[-1]
    assert (stamp_of(changed, changed_bucket) != stamp_of(plan, last)) == again
    assert stamp_of(plan, plan.buckets[1]) != stamp_of(plan, last)


def test_the_key_tells_models_sources_and_toolchains_apart(plan, tmp_path, monkeypatch):
    bucket = plan.buckets[-1]
    other = tiny.planned_device(tiny.write_checkpoint(tmp_path / "npu", **{**tiny.NPU_SIZES, "rms_norm_eps": 1e-5}))
    keys = {stamp_of(plan, bucket), stamp_of(other, bucket)}
    with monkeypatch.context() as patched:
        patched.setattr(stamp, "source_digest", lambda: "other sources")
        keys.add(stamp_of(plan, bucket))
    with monkeypatch.context() as patched:
        patched.setattr(driver, "toolchain", lambda: {"torch": "9"})
        keys.add(stamp_of(plan, bucket))
    assert len(keys) == 4


@pytest.mark.parametrize("folder", ["graphs", "stages"])
def test_a_harmed_file_is_made_again(plan, lowered, build, tmp_path, folder):
    build(plan)
    before = tiny.contents(tmp_path / "out")
    entry = next(e for e in Artifact.open(tmp_path / "out").manifest.graphs if e.bucket.name == "decode-b4-q2")
    tiny.tampered(tmp_path / "out" / (entry.compiled.file if folder == "graphs" else entry.stages))
    lowered.clear()
    build(plan)
    assert lowered == ["decode-b4-q2"]
    assert tiny.contents(tmp_path / "out") == before


def test_a_bucket_that_was_made_to_be_priced_is_taken_where_the_plan_has_the_same(plan, lowered, build, tmp_path):
    other = replace(plan, max_logprobs=3)
    made = [tiny.compile_once(pool.CompileJob(each, plan.buckets[-1], tmp_path)) for each in (plan, other)]
    report = build(plan, made=made)
    assert (lowered, sorted(report.compiled)) == (ORDER[1:], sorted(NAMES))
    build(plan, "whole")
    assert tiny.contents(tmp_path / "out") == tiny.contents(tmp_path / "whole")
    lowered.clear()
    build(other, "other", made=made[:1])
    assert lowered == ORDER


def interrupted(monkeypatch, after):
    """A pool whose next bucket after so many is never done."""
    real = derived.run_all

    def run_all(jobs, workers):
        for number, compiled in enumerate(real(jobs, workers)):
            if number == after:
                raise KeyboardInterrupt
            yield compiled

    monkeypatch.setattr(derived, "run_all", run_all)


def test_an_interrupted_build_leaves_nothing_and_goes_on_where_it_was(plan, lowered, build, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        interrupted(patched, after=2)
        with pytest.raises(KeyboardInterrupt):
            build(plan)
    assert not (tmp_path / "out").exists()
    assert len(list((tmp_path / "cache" / "unfinished").iterdir())) == 2
    lowered.clear()
    report = build(plan)
    assert lowered == ORDER[2:]
    assert sorted(report.reused) == sorted(ORDER[:2])
    assert list((tmp_path / "cache" / "unfinished").iterdir()) == []
    monkeypatch.undo()
    monkeypatch.setattr(pool, "run", tiny.compile_once)
    build(plan, "whole")
    assert tiny.contents(tmp_path / "whole") == tiny.contents(tmp_path / "out")


def test_an_interrupted_build_goes_on_with_an_executable_of_the_previous_artifact(plan, lowered, build, tmp_path, monkeypatch):
    build(plan)
    graphs = [entry.compiled for entry in Artifact.open(tmp_path / "out").manifest.graphs]
    monkeypatch.setattr(stamp, "source_digest", lambda: "other sources")
    with monkeypatch.context() as patched:
        interrupted(patched, after=1)
        with pytest.raises(KeyboardInterrupt):
            build(plan)
    build(plan)
    assert [entry.compiled for entry in Artifact.open(tmp_path / "out").manifest.graphs] == graphs


def test_a_graph_whose_ranks_would_wait_for_ever_is_refused(plan, lowered, build, tmp_path, monkeypatch):
    def run(job):
        result = tiny.compile_once(job)
        return replace(result, staged=replace(result.staged, collectives=(("all_reduce", "ep", "bf16[4]"),)))

    monkeypatch.setattr(pool, "run", run)
    with pytest.raises(LoweringError, match=r"collectives are over the groups ep; mesh dp=2,tp=2 has"):
        build(plan)
    assert not (tmp_path / "out").exists()


PACKED_EXPERTS = Path(__file__).parents[2] / "models/quant/packed_experts/group"


@pytest.mark.parametrize(
    ("directory", "backend"),
    [
        (modelslim.FIXTURES / "dense_w8a8_parts_m4", "ge"),
        (modelslim.FIXTURES / "moe_w4a8_smooth", "ge"),
        (PACKED_EXPERTS, "ge"),
        (PACKED_EXPERTS, "aclgraph"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_a_quantised_checkpoint_is_lowered_in_its_own_formats(build, monkeypatch, directory, backend):
    """Biases that smoothing left are added; every operator is legal, or the build would fail."""
    monkeypatch.setattr(pool, "run", lambda job: tiny.quietly(_run, job))
    sizes = {"buckets": (2,), "max_num_seqs": 2, "num_speculative_tokens": None}
    plan = tiny.planned_device(directory, mesh="tp=2", backend=backend, **sizes)
    report = build(plan)
    manifest = Artifact.open(report.path).manifest
    formats = formats_in(directory)
    assert Formats.of_fields(manifest.formats) == formats
    assert any(leaf.name.endswith("input_norm.bias") for leaf in manifest.params) == bool(formats.biased)
