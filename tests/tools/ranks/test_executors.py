"""tools/ranks/executors.py: an artifact is loaded where it can run; elsewhere it says what is missing, and what runs instead."""

from __future__ import annotations

import io
import shutil
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import documents, tiny

from npucompile.graphs.errors import ArtifactError, CheckpointError, LoweringError, SpecError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.lowering.ascend import hccl, npu
from npucompile.lowering.ascend.device import GeExecutable
from npucompile.lowering.ascend.ge_file import decode, patched
from npucompile.lowering.ascend.toolchain import harness
from npucompile.lowering.device import open_device
from npucompile.lowering.switches import BUCKETS, NZ
from npucompile.runtime.device_executor import DeviceExecutor
from npucompile.runtime.distributed.process_groups import gloo
from npucompile.runtime.request import Sampling
from npucompile.tools.builder import plan as planning
from npucompile.tools.notation import PrefillSize
from npucompile.tools.progress import Progress
from npucompile.tools.ranks import executors as module
from npucompile.tools.ranks.executors import choose_device, load_executor, settled, with_few_buckets, without_buckets
from npucompile.tools.ranks.offline import complete
from npucompile.tools.ranks.rank_settings import RankSettings

NO_CANN = "running on an NPU needs CANN, and this machine has none; install it and source its set_env.sh"
AUTO = RankSettings(device="auto")


@pytest.fixture
def described(tmp_path):
    """An artifact of a plan, without graphs."""
    return lambda plan: tiny.without_graphs(plan, tmp_path / "out")


@pytest.fixture
def preset(described):
    """An artifact of a preset, which has no weights."""
    return described(
        planning.plan(planning.Options("qwen3.5-27b", target="ascend-a3", mesh="tp=2", buckets=(4,), prefill=(PrefillSize(128),)))
    )


@pytest.fixture(autouse=True)
def without_cann(monkeypatch):
    monkeypatch.setattr(npu, "cann", lambda _: None)


def refusal(kind, function, *arguments):
    with pytest.raises(kind) as caught:
        function(*arguments)
    return str(caught.value)


# --- which device ---


def test_what_was_built_for_this_cpu_runs_on_it(tiny_artifact):
    artifact = Artifact.open(tiny_artifact)
    assert choose_device(artifact, "auto") == choose_device(artifact, "cpu") == "cpu"
    assert settled(artifact, AUTO) == replace(AUTO, device="cpu")


@pytest.mark.parametrize("device", ["emulated", "npu"])
def test_what_was_built_for_this_cpu_runs_on_nothing_else(tiny_artifact, device):
    expected = f"--device {device}: {tiny_artifact} was built for cpu; legal are auto and cpu"
    assert refusal(SpecError, settled, Artifact.open(tiny_artifact), RankSettings(device=device)) == expected


def test_what_was_built_for_this_cpu_has_its_weights(tiny_artifact, tmp_path):
    expected = f"--checkpoint is for artifacts for NPUs; {tiny_artifact} has its weights, for cpu"
    assert refusal(SpecError, settled, Artifact.open(tiny_artifact), replace(AUTO, checkpoint=tmp_path)) == expected


@pytest.mark.parametrize(("mesh", "machine"), [("", "1 NPU of ascend-a3"), ("dp=2,tp=2", "4 NPUs of ascend-a3")])
@pytest.mark.parametrize("device", ["auto", "npu"])
def test_without_cann_it_says_what_is_missing_and_what_runs_here(described, model, device, mesh, machine):
    artifact = described(tiny.planned_device(model, mesh=mesh))
    instead = "--device emulated runs it on this CPU by interpreting its graphs, which is meant for small models"
    assert (
        refusal(ArtifactError, settled, artifact, RankSettings(device=device)) == f"{artifact.path} is for {machine}: {NO_CANN}; {instead}"
    )
    assert settled(artifact, RankSettings(device="emulated")).device == "emulated"


def test_with_an_npu_that_is_chosen(described, model, monkeypatch):
    artifact = described(tiny.planned_device(model))
    monkeypatch.setattr(npu, "missing", lambda: None)
    assert settled(artifact, AUTO).device == "npu"
    assert settled(artifact, RankSettings(device="emulated")).device == "emulated"


def test_what_was_built_for_npus_does_not_run_on_the_cpu(described, model):
    artifact = described(tiny.planned_device(model))
    expected = f"--device cpu: {artifact.path} was built for ascend-a3; legal are auto and npu and emulated"
    assert refusal(SpecError, settled, artifact, RankSettings(device="cpu")) == expected


def test_a_served_map_is_for_npus(tiny_artifact):
    artifact = Artifact.open(tiny_artifact)
    expected = f"serve takes --expert-map for artifacts for NPUs; {artifact.path} is for cpu: build again"
    assert refusal(SpecError, settled, artifact, RankSettings(device="auto", expert_map="{}")) == expected


# --- which weights ---


def test_a_preset_that_cannot_run_here_says_what_can_as_three_commands(preset):
    instead = (
        "what runs here is a small model of the same layers: `npucompile models qwen3.5-27b --reduce SMALL`, `npucompile build SMALL "
        "--target ascend-a3 --mesh tp=2 --quantization none`, `npucompile serve SMALL --device emulated`"
    )
    assert refusal(ArtifactError, settled, preset, AUTO) == f"{preset.path} is for 2 NPUs of ascend-a3: {NO_CANN}; {instead}"
    expected = f"{preset.path} was built without weights: name a checkpoint of the model with --checkpoint DIR; {instead}"
    assert refusal(ArtifactError, settled, preset, RankSettings(device="emulated")) == expected
    assert list(documents.wrong_commands(expected)) == []


def test_what_is_for_this_cpu_and_has_no_weights_is_refused(own_artifact):
    artifact = tiny.published(own_artifact, lambda manifest, _: replace(manifest, weights=None))
    expected = f"{own_artifact} was built without weights: it can be inspected, and not run; build a checkpoint directory"
    assert refusal(ArtifactError, settled, artifact, AUTO) == expected


# --- loading ---


def test_an_executor_of_an_emulated_device_keeps_its_compiled_graphs(npu_artifact, tmp_path):
    artifact, devices = Artifact.open(npu_artifact("")), []
    settings = RankSettings(
        device="emulated",
        cache=tmp_path,
        step_timeout_s=60,
        open_device=lambda *place: devices.append(open_device(*place)) or devices[-1],
    )
    tokens = []
    for outcome in ("compiled", "cached"):
        output = io.StringIO()
        with ExitStack() as stack:
            executor = load_executor(artifact, settings, stack, Progress(output))
            assert isinstance(executor, DeviceExecutor)
            (completion,) = complete(executor, [[1, 2, 3]], Sampling(), 4, frozenset())
            tokens.append(completion.token_ids)
        lines = [line.removeprefix("compile for emulated:0 ").split(" s, ") for line in output.getvalue().splitlines()]
        assert [" ".join(line[0].split()[:2]) for line in lines] == ["1/3 decode-b2-q2", "2/3 prefill-b1-q4", "3/3 decode-b1-q2"]
        assert {line[1] for line in lines} == {f"{outcome}, 0 MiB in use"}
        assert (tmp_path / "ge" / devices[-1].version).is_dir()
        with pytest.raises(LoweringError, match="emulated:0 is closed"):
            devices[-1].zeros((1,), torch.int32)
    assert tokens[0] == tokens[1]


def test_another_checkpoint_than_it_was_built_from_is_refused_before_anything_is_read(npu_artifact, tmp_path):
    artifact = Artifact.open(npu_artifact(""))
    other = shutil.copytree(artifact.manifest.build_arguments[0], tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with ExitStack() as stack, pytest.raises(CheckpointError, match=f"{other} has digest .*; {artifact.path} was built from"):
        load_executor(artifact, RankSettings(device="emulated", checkpoint=other), stack, tiny.QUIET)


def test_a_bucket_that_cannot_run_is_said(npu_artifact, monkeypatch):
    artifact, output = Artifact.open(npu_artifact("")), io.StringIO()
    compile_it = GeExecutable.compile

    def refusing(executable, operands, cache_dir=None):
        if executable.ge_file == refused:
            raise LoweringError("no tiling")
        return compile_it(executable, operands, cache_dir)

    entry = next(entry for entry in artifact.manifest.graphs if entry.bucket.name == "decode-b1-q2")
    refused = patched(decode((artifact.path / entry.compiled.file).read_bytes()), 0, {})
    monkeypatch.setattr(GeExecutable, "compile", refusing)
    with ExitStack() as stack:
        executor = load_executor(artifact, RankSettings(device="emulated"), stack, Progress(output))
        assert [bucket.name for bucket in executor.missing] == ["decode-b1-q2"]
    assert output.getvalue().splitlines()[-1].endswith("s, cannot run: no tiling")


def test_few_buckets_are_the_largest_of_each_kind_and_one_that_is_named(npu_artifact):
    artifact, output = Artifact.open(npu_artifact("")), io.StringIO()
    named = {entry.bucket.name for entry in with_few_buckets(artifact, "decode-b1-q2").manifest.graphs}
    assert named == {"prefill-b1-q4", "decode-b1-q2", "decode-b2-q2"}
    with ExitStack() as stack:
        executor = load_executor(artifact, RankSettings(device="emulated", off=frozenset({BUCKETS})), stack, Progress(output))
        assert [bucket.name for bucket in executor.buckets] == ["decode-b2-q2", "prefill-b1-q4"]
        assert executor.missing == {}
        (completion,) = complete(executor, [[1, 2, 3]], Sampling(), 4, frozenset())
    assert len(completion.token_ids) == 4


def test_a_bucket_is_left_out_unless_its_kind_has_no_other(npu_artifact):
    artifact = Artifact.open(npu_artifact(""))
    names = {entry.bucket.name for entry in artifact.manifest.graphs}
    for without, gone in ((set(), set()), ({"decode-b1-q2"}, {"decode-b1-q2"}), (names, set()), ({"prefill-b1-q4"}, set())):
        left = without_buckets(artifact, without)
        assert {entry.bucket.name for entry in left.manifest.graphs} == names - gone
    settings = RankSettings(device="emulated", without=frozenset({"decode-b2-q2"}))
    with ExitStack() as stack:
        executor = load_executor(artifact, settings, stack, Progress(quiet=True))
        assert [bucket.name for bucket in executor.buckets] == ["decode-b1-q2", "prefill-b1-q4"]


def test_switches_are_for_npus(tiny_artifact):
    with pytest.raises(SpecError, match=r"--off nz: switches are for artifacts for NPUs"):
        settled(Artifact.open(tiny_artifact), RankSettings(device="auto", off=frozenset({NZ})))


def test_only_npus_need_hccl(tmp_path, monkeypatch):
    assert module._group_maker(SimpleNamespace(kind="emulated"), {"tp": 1}) is gloo
    loaded = replace(harness.load(tmp_path), cann="a stand-in")
    monkeypatch.setattr(npu.NpuDevice, "__init__", lambda self: setattr(self, "_torch_npu", loaded.torch_npu))
    calls = []
    monkeypatch.setattr(hccl, "group_maker", lambda *args: calls.append(args) or "made")
    assert module._group_maker(npu.NpuDevice(), {"tp": 7}) == "made"
    assert calls == [(loaded.torch_npu, {"tp": 7})]
