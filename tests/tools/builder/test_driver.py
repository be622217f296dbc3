"""tools/builder/driver.py: builds for this machine: refused, repeated, interrupted and damaged ones."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import kernels, tiny

from npucompile.graphs.errors import ArtifactError, CheckpointError, ConfigError, LoweringError, ModelError, VerifyError
from npucompile.lowering.artifact.artifact import MANIFEST, Artifact
from npucompile.models import registry
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.engine import Engine
from npucompile.runtime.request import Request
from npucompile.tools.agreement import executables
from npucompile.tools.builder import driver, pool
from npucompile.tools.inspection import summary
from npucompile.tools.notation import PrefillSize
from npucompile.tools.progress import Progress
from npucompile.tools.serve.serving import incomplete

SMALL = {"buckets": (1, 2), "prefill": (4,)}
PAIRED = {"buckets": (1, 2), "prefill": (4, PrefillSize(4, 2)), "backend": "stub"}
BUCKETS = ["decode-b1-q4", "decode-b2-q4", "prefill-b1-q4"]


@pytest.fixture
def model(tmp_path):
    return tiny.write_checkpoint(tmp_path / "model")


def rewritten(model, change):
    file = model / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def drop(model):
    rewritten(model, lambda tensors: tensors.pop("model.layers.1.self_attn.k_norm.weight"))


def reshape(model):
    rewritten(model, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(31)}))


def truncate(model):
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def break_config(model):
    (model / "config.json").write_text('{"model_type": "qwen3_5_moe_text",')


def empty_config(model):
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe_text", "vocab_size": "many"}))


def break_tokenizer(model):
    (model / "tokenizer.json").write_text('{"model": 1}')


BAD_MODELS = [
    (drop, CheckpointError, r"tensor model\.layers\.1\.self_attn\.k_norm\.weight .*is missing"),
    (reshape, CheckpointError, r"tensor model\.norm\.weight \(found \[31\], expected \[32\]\) has a wrong shape"),
    (truncate, CheckpointError, r"model\.safetensors: truncated or corrupt safetensors"),
    (break_config, ConfigError, r"config\.json: not readable as JSON"),
    (empty_config, ConfigError, r"config\.json: .*num_attention_heads is missing|vocab_size is 'many'"),
    (break_tokenizer, ModelError, r"tokenizer\.json is not a tokenizer\.json"),
]


@pytest.mark.parametrize(("spoil", "error", "message"), BAD_MODELS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_refused_build_leaves_what_was_there_or_nothing_and_traces_nothing(tmp_path, model, monkeypatch, spoil, error, message):
    out, new = tmp_path / "out", tmp_path / "there" / "out"
    tiny.built(tiny.planned(model, **SMALL), out)
    before = tiny.contents(out)
    spoil(model)
    monkeypatch.setattr(tiny.stages, "stage", None)
    for place in (out, new):
        with pytest.raises(error, match=message):
            tiny.built(tiny.planned(model, **SMALL), place, fresh=place == new)
    assert tiny.contents(out) == before
    Artifact.open(out)
    assert not new.exists()
    assert not new.parent.exists() or list(new.parent.iterdir()) == []


def test_what_all_compiles_need_is_made_in_a_thread_where_there_is_something_to_compile(tmp_path, tiny_checkpoint, stub, monkeypatch):
    made = threading.Event()

    def warm(cache_dir):
        made.set()
        raise LoweringError("whoever compiles says so")

    monkeypatch.setattr(stub, "warm", warm, raising=False)
    monkeypatch.setattr(driver, "run_all", lambda jobs, workers: map(pool.run, jobs))
    for wanted in (True, False):
        made.clear()
        driver.build(tiny.planned(tiny_checkpoint, backend="stub", **SMALL), tmp_path / "out", tmp_path / "cache", tiny.QUIET, jobs=2)
        assert made.wait(10 if wanted else 0.2) is wanted


def test_every_bucket_is_compiled_proved_and_published(tmp_path, tiny_checkpoint, stub):
    report = tiny.built(tiny.planned(tiny_checkpoint, backend="stub", **SMALL), tmp_path / "out")
    assert stub.compiled == ["decode-b1-q4", "decode-b2-q4", "prefill-b1-q4"]
    assert sorted(report.compiled) == BUCKETS
    assert report.reused == ()
    assert report.seconds >= report.ready_seconds
    artifact = Artifact.open(tmp_path / "out")
    assert (artifact.manifest.target, artifact.manifest.backend) == ("cpu", "stub")
    for entry in artifact.manifest.graphs:
        assert entry.backend == "stub"
        assert entry.verified["logits_error"] < 1e-5
        assert entry.verified["rows"] >= entry.bucket.batch
    assert not [name for name in tiny.contents(tmp_path / "out") if "/." in name or name not in {*artifact.manifest.files, MANIFEST}]


def test_another_compiler_compiles_all_again(tmp_path, tiny_checkpoint, stub):
    plan = tiny.planned(tiny_checkpoint, backend="stub", **SMALL)
    tiny.built(plan, tmp_path / "out")
    stub.compiled.clear()
    stub.version = 2
    assert sorted(tiny.built(plan, tmp_path / "out").compiled) == sorted(stub.compiled) == BUCKETS


def test_new_weights_are_proved_with_what_was_compiled(tmp_path, model, stub):
    out = tmp_path / "out"
    plan = tiny.planned(model, backend="stub", **SMALL)
    tiny.built(plan, out)
    before = Artifact.open(out).manifest
    stub.compiled.clear()
    tiny.write_checkpoint(model, seed=1)
    report = tiny.built(plan, out)
    after = Artifact.open(out).manifest
    assert stub.compiled == []
    assert sorted(report.reused) == BUCKETS
    assert after.weights != before.weights
    for old, new in zip(before.graphs, after.graphs, strict=True):
        assert new.compiled == old.compiled
        assert new.verified["rows"] == old.verified["rows"]
    assert any(new.verified != old.verified for old, new in zip(before.graphs, after.graphs, strict=True))


def test_new_weights_that_an_executable_gets_wrong_are_served_uncompiled(tmp_path, model, stub):
    out = tmp_path / "out"
    plan = tiny.planned(model, backend="stub", **SMALL)
    tiny.built(plan, out)
    tiny.write_checkpoint(model, seed=1)
    stub.error = 1.0
    with pytest.raises(VerifyError, match=r"prefill-b1-q4 \(stub\) against eager rows run alone: logits differ by"):
        tiny.built(plan, out)
    artifact = Artifact.open(out)
    assert {entry.backend for entry in artifact.manifest.graphs} == {"eager"}
    assert torch.equal(artifact.load_weights()["params.norm"], load_file(model / "model.safetensors")["model.norm.weight"])


def test_one_executable_that_disagrees_is_left_out_and_the_next_larger_bucket_runs_its_steps(tmp_path, tiny_checkpoint, stub, monkeypatch):
    said = []
    monkeypatch.setattr(Progress, "say", lambda _, text: said.append(text))
    stub.error, stub.wrong = 1e-3, 1
    out, plan = tmp_path / "out", tiny.planned(tiny_checkpoint, **PAIRED)
    tiny.built(plan, out, progress=Progress())
    artifact = Artifact.open(out)
    found = {entry.bucket.name: (entry.backend, entry.refused[:28]) for entry in artifact.manifest.graphs}
    assert found == {
        "prefill-b1-q4": ("eager", "prefill-b1-q4 (stub) against"), "prefill-b2-q4": ("stub", ""),
        "decode-b1-q4": ("eager", "decode-b1-q4 (stub) against "), "decode-b2-q4": ("stub", ""),
    }  # fmt: skip
    assert sum("left out: " in text and "legal is at most" in text for text in said) == 2
    assert sum(line.startswith("left out: ") for line in summary.table(artifact, artifact.manifest.graphs)) == 2
    # It is not compiled again, nor is it built behind a server.
    stub.compiled.clear()
    tiny.built(plan, out)
    assert (stub.compiled, incomplete(Artifact.open(out))) == ([], False)
    executor = CpuExecutor(artifact)
    assert {bucket.name for bucket in executor.missing} == {"prefill-b1-q4", "decode-b1-q4"}
    assert set(executor.backends.values()) == {"stub"}
    engine, events = Engine(executor, refresh_every_s=None), []
    engine.submit(Request("r", (1, 2, 3, 4, 5), 6), events.append)
    while engine.step():
        pass
    assert (events[-1].reason, set(engine.stats()["degraded_steps"])) == ("length", {"prefill-b1-q4", "decode-b1-q4"})
    # Other weights may fit.
    stub.error = 0.0
    tiny.write_checkpoint(tmp_path / "other", seed=3)
    tiny.built(tiny.planned(tmp_path / "other", **PAIRED), out)
    assert {entry.backend for entry in Artifact.open(out).manifest.graphs} == {"stub"}


def test_an_eager_graph_that_is_wrong_is_not_served_in_place_of_its_executable(tmp_path, tiny_checkpoint, stub, monkeypatch):
    plain = executables.check_tolerance

    def check(differences, tolerance, what):
        if "(eager)" in what:
            raise VerifyError(what)
        return plain(differences, tolerance, what)

    monkeypatch.setattr(executables, "check_tolerance", check)
    with pytest.raises(VerifyError, match=r"decode-b2-q4 \(eager\)"):
        tiny.built(tiny.planned(tiny_checkpoint, backend="stub", **SMALL), tmp_path / "out")


@pytest.mark.skipif(torch.cpu.get_capabilities().get("architecture") != "x86_64", reason="levels are of x86-64")
@pytest.mark.parametrize(("drafts", "dtype"), [(0, "auto"), (0, "float32"), (3, "auto")], ids=["auto", "float32", "drafts"])
@pytest.mark.short_cases("auto")
def test_a_build_is_proved_with_avx_512_hidden(tmp_path, tiny_checkpoint, drafts, dtype):
    """In the dtype that a CPU without AVX-512 gets, and in float32, with one decode graph and one of prefill."""
    # Kept for later runs, as the kernels of tests/support are: what is compiled goes by its sources, and is proved each time.
    home = Path(tempfile.gettempdir()) / f"npuc-avx2-{os.getuid()}-{drafts}-{dtype}"
    kernels.keep_native(home / "cache")
    out, environment = tmp_path / "out", {**os.environ, "NPUCOMPILE_ISA": "avx2", "NPUCOMPILE_HOME": str(home)}
    options = ["--buckets", "1,2" if drafts else "2", "--prefill", "16", "--max-model-len", "64", "--speculative-tokens", str(drafts)]
    options += ["--dtype", dtype]
    command = [sys.executable, "-m", "npucompile.tools.cli", "build", str(tiny_checkpoint), *options, "--out", str(out)]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    shutil.rmtree(home / "cache" / "headers", ignore_errors=True)
    manifest = Artifact.open(out).manifest
    assert manifest.dtype == ("f32" if dtype == "float32" else "bf16")
    assert [name for name in manifest.cpu_features if "avx512" in name] == []
    assert "avx2" in manifest.cpu_features
    for entry in manifest.graphs:
        assert (entry.backend, entry.refused) == ("inductor", "")
        assert entry.verified["logits_error"] < (1e-5 if dtype == "float32" else 0.1)


def test_a_build_that_fails_half_way_goes_on_where_it_was(tmp_path, tiny_checkpoint, stub):
    out = tmp_path / "out"
    plan = tiny.planned(tiny_checkpoint, backend="stub", **SMALL)
    stub.refuses = "prefill-b1"
    with pytest.raises(LoweringError, match="does not like prefill-b1-q4"):
        tiny.built(plan, out)
    assert {entry.bucket.name: entry.backend for entry in Artifact.open(out).manifest.graphs} == {
        "prefill-b1-q4": "eager", "decode-b1-q4": "stub", "decode-b2-q4": "stub",
    }  # fmt: skip
    stub.refuses = None
    stub.compiled.clear()
    assert sorted(tiny.built(plan, out).reused) == ["decode-b1-q4", "decode-b2-q4"]
    assert stub.compiled == ["prefill-b1-q4"]


def test_damaged_weights_and_graphs_are_written_again(tmp_path, tiny_checkpoint):
    out = tmp_path / "out"
    plan = tiny.planned(tiny_checkpoint, **SMALL)
    tiny.built(plan, out)
    before = tiny.contents(out)
    for name in before:
        tiny.tampered(out / name)
    tiny.built(plan, out)
    assert tiny.contents(out) == before


def test_an_uncompiled_artifact_is_the_same_bytes_wherever_and_whenever_it_is_built(tmp_path, tiny_checkpoint):
    """Traced twice, in two processes that order their sets differently."""
    plan = tiny.planned(tiny_checkpoint, **SMALL)
    tiny.built(plan, tmp_path / "here", fresh=True)
    arguments = [*plan.arguments, "--out", str(tmp_path / "there" / "out")]
    environment = {**os.environ, "PYTHONHASHSEED": "7", "NPUCOMPILE_HOME": str(tmp_path / "home")}
    ran = subprocess.run(
        [sys.executable, "-m", "npucompile.tools.cli", "build", *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == str(tmp_path / "there" / "out")
    here, there = tiny.contents(tmp_path / "here"), tiny.contents(tmp_path / "there" / "out")
    assert list(here) == list(there)
    assert [name for name in here if here[name] != there[name]] == []


def test_a_template_that_no_server_can_use_is_refused_before_anything_is_built(tmp_path, tiny_checkpoint):
    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    (checkpoint / "chat_template.jinja").write_text("{% if x %}")
    with pytest.raises(ModelError, match="the chat template is not Jinja: line 1"):
        tiny.built(tiny.planned(checkpoint, **SMALL), tmp_path / "out", fresh=True)
    assert not (tmp_path / "out").exists()


def test_a_report_of_sizes_needs_no_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "PRESETS", {"only-sizes": tiny.CONFIG})
    out = tmp_path / "out"
    plan = tiny.planned("only-sizes", backend="null", **SMALL)
    tiny.built(plan, out)
    artifact = Artifact.open(out)
    assert artifact.manifest.weights is None
    assert artifact.manifest.tokenizer is None
    assert {entry.memory["params_bytes"] for entry in artifact.manifest.graphs} == {plan.params_bytes}
    with pytest.raises(ArtifactError, match="built without weights"):
        artifact.load_weights()


def test_progress_says_when_it_can_serve_and_how_well_it_is_proved(tmp_path, tiny_checkpoint, stub):
    output = io.StringIO()
    tiny.built(tiny.planned(tiny_checkpoint, backend="stub", **SMALL), tmp_path / "out", progress=Progress(output))
    assert re.search(r"out can serve \(\d+\.\d s\); compiling 3 of 3 buckets", output.getvalue())
    assert re.search(r"compile and verify \(stub\) 3/3 prefill-b1-q4 \d+\.\d s, logits within \d", output.getvalue())
