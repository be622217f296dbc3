"""tools/prove/bringup/captured.py: each operator of captured graphs alone; a wrong kernel is found, and one that cannot be captured."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from support import ranks, tiny
from support import small_images as images

from npucompile.graphs.types import Mesh
from npucompile.lowering.ascend.emulator import checks
from npucompile.lowering.ascend.emulator.acl_engine import EmulatedAclEngine
from npucompile.lowering.ascend.emulator.device import open_device
from npucompile.tools.prove.bringup import captured
from npucompile.tools.prove.bringup.device_graph import Host
from npucompile.tools.prove.bringup.recording import shipped_buckets
from npucompile.tools.prove.bringup.steps import StepPlanner
from npucompile.tools.ranks.executors import params_of
from npucompile.tools.ranks.rank_settings import RankSettings

NORM = "npu.npu_rms_norm.default"


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """The distinct operators of a decode step."""
    artifact = images.shipped(ranks.SIZES, tmp_path_factory, backend="aclgraph")
    graph = next(graph for graph in shipped_buckets(artifact) if graph.bucket.kind == "decode")
    mesh, manifest = Mesh.parse(artifact.manifest.mesh), artifact.manifest
    planner = StepPlanner(manifest.limits, int(manifest.model["vocab_size"]), mesh.axis("dp"), 0)
    state = [planner.initial_state(graph.signature.state) for _ in range(mesh.size)]
    settings = RankSettings(device="emulated")
    recorder = captured.CallRecorder(graph, mesh, lambda rank: params_of(artifact, settings, rank, tiny.QUIET), state)
    for step in planner.of_one_bucket(graph.bucket, 1):
        recorder.run(step)
    return list(recorder.calls.values())


@pytest.fixture
def host(tmp_path: Path):
    device = open_device(0)
    yield Host(device, tmp_path)
    device.close()


def run(host, calls):
    judged = [call.judge(host) for call in calls]
    return tuple([each for judgement in judged for each in judgement[part]] for part in (0, 1))


def test_every_operator_is_right_alone_and_one_call_of_each_is_captured(host, calls):
    names = {call.target for call in calls}
    assert {"npu.npu_fused_infer_attention_score.default", "npu.npu_recurrent_gated_delta_rule.default", NORM} <= names
    assert not any("all_gather" in name or "view" in name for name in names)
    assert sum(call.captured for call in calls) == len(names)
    failures, timings = run(host, calls)
    assert not failures
    assert len({call.name for call in calls}) == len(calls)
    assert len(timings) == len(calls)
    assert all(timing.seconds > 0 and timing.moved_bytes > 0 for timing in timings)


def test_calls_reach_another_process(calls) -> None:
    file = io.BytesIO()
    torch.save(calls, file)
    file.seek(0)
    got = torch.load(file, weights_only=False)
    assert {torch.contiguous_format} == {call.kwargs["memory_format"] for call in got if "memory_format" in call.kwargs}
    assert [call.file() for call in got] == [call.file() for call in calls]


def test_a_wrong_kernel_is_named_with_its_operands(host, calls, monkeypatch):
    right = EmulatedAclEngine.find

    def wrong(self, name):
        kernel = right(self, name)
        return (lambda *args, **kwargs: tuple(value + 1 for value in kernel(*args, **kwargs))) if name == NORM else kernel

    monkeypatch.setattr(EmulatedAclEngine, "find", wrong)
    failures, _ = run(host, [call for call in calls if call.target in (NORM, "aten.mul.Tensor")])
    assert {failure.what for failure in failures} == {call.name for call in calls if call.target == NORM}
    assert {failure.assumption for failure in failures} == {"kernels"}
    assert "values differ; at" in failures[0].message


def test_a_pool_that_is_written_elsewhere_is_a_failure(host, calls, monkeypatch):
    name = "npu.npu_scatter_pa_kv_cache.default"
    right = EmulatedAclEngine.find
    monkeypatch.setattr(EmulatedAclEngine, "find", lambda self, each: (lambda *a, **k: ()) if each == name else right(self, each))
    failures, _ = run(host, [call for call in calls if call.target == name])
    assert failures
    assert all("operand 2" in failure.message for failure in failures)


def test_what_cannot_be_captured_refutes_that_it_can(host, calls, monkeypatch):
    monkeypatch.setattr(checks, "MAX_STREAMS", 0)
    call = next(call for call in calls if call.captured)
    failures, timings = run(host, [call])
    assert ([failure.assumption for failure in failures], timings) == (["capture"], [])
    assert torch.is_tensor(call.tensors[0])
