"""lowering/backends/inductor_cuda.py: a step is lowered to aten operators on a GPU, and the artifact says for which one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import tiny

from npucompile.graphs import native_ops
from npucompile.graphs.errors import ArtifactError, LoweringError, SpecError
from npucompile.graphs.types import Bucket
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.lowering.artifact.graph_io import decode
from npucompile.lowering.backend import backend
from npucompile.lowering.cuda import cuda_file
from npucompile.lowering.platform import CPU, Platform
from npucompile.tools.build import driver, stages
from npucompile.tools.serve.executors import choose_device

SIZES = {"target": "cuda", "backend": None, "buckets": (2,), "prefill": (16,), "checkpoint_slots": None}


@pytest.fixture(scope="module")
def staged(tiny_checkpoint):
    return stages.stage(tiny.planned(tiny_checkpoint, **SIZES), Bucket("decode", 2, 4))


def test_the_graph_is_of_aten_operators_on_a_gpu(staged):
    nodes = [node for node in staged.lowered.graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert {node.target.namespace for node in nodes} <= {"aten", "prims"}
    assert native_ops.NAMESPACE not in staged.texts["lowered"]
    devices = {str(node.kwargs["device"]) for node in nodes if "device" in node.kwargs}
    assert devices == {"cuda"}
    pools = {node.args[0].name for node in nodes if node.target is torch.ops.aten.copy_.default}
    assert len(pools) == len(staged.lowered.signature.state), "every pool is written"


def test_the_file_is_of_the_graph_and_the_capability(staged, tmp_path):
    chosen = backend("inductor_cuda")
    first, again = (chosen.compile(staged.lowered, cache_dir=tmp_path, threads=0) for _ in range(2))
    assert first.data == again.data
    read = cuda_file.decode(first.data)
    assert read.arch == "90"
    assert len(decode(read.graph).graph.nodes) == len(staged.lowered.graph.graph.nodes)
    assert first.census["aten.mm"] > 0
    other = chosen.compile(replace(staged.lowered, platform=Platform("sm_80")), cache_dir=tmp_path, threads=0)
    assert other.data != first.data
    with pytest.raises(LoweringError, match=r"the platform's chip is ''; legal for a GPU are sm_80"):
        chosen.compile(replace(staged.lowered, platform=CPU), cache_dir=tmp_path, threads=0)
    (tmp_path / "x.cuda").write_bytes(first.data)
    with pytest.raises(LoweringError, match=r"x\.cuda runs on a GPU, which opens it"):
        chosen.open(tmp_path / "x.cuda")


def test_what_decides_the_bytes_decides_the_stamp(tiny_checkpoint):
    plans = [tiny.planned(tiny_checkpoint, **SIZES, cuda_arch=arch) for arch in (None, "90", "80")]
    stamps = [driver.facts(plan, plan.buckets[0]) for plan in plans]
    assert stamps[0] == stamps[1] != stamps[2]
    assert [plan.target.hbm_bytes_per_s for plan in plans] == [3.35e12, 3.35e12, 2.039e12]
    assert plans[2].arguments[plans[2].arguments.index("--cuda-arch") + 1] == "80"
    assert any("torch" in fact for fact in map(str, stamps[0]))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"mesh": "tp=2"}, "mesh tp=2 has 2 ranks and cuda at most 1"),
        ({"backend": "inductor"}, "--backend inductor makes nothing that cuda runs; legal are inductor_cuda, null"),
        ({"target": "cpu", "cuda_arch": "90", "backend": "eager"}, "--cuda-arch 90 is for GPUs, the target is cpu; legal is --target cuda"),
        ({"cuda_arch": "70"}, "--cuda-arch 70: legal are 80, 86, 89, 90, 100"),
        ({"quantization": "w8a8"}, "--quantization w8a8: graphs for GPUs multiply floats alone; legal is a checkpoint of floats"),
        ({"cann": "9.1"}, "--cann and --operator-packages are for NPUs, the target is cuda"),
    ],
)
def test_what_does_not_fit_is_refused(tiny_checkpoint, options, why):
    with pytest.raises(SpecError, match=why):
        tiny.planned(tiny_checkpoint, **{**SIZES, **options})


def test_a_machine_without_a_gpu_says_what_it_lacks(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    plan = tiny.planned(tiny_checkpoint, **SIZES, max_model_len=64)
    tiny.built(plan, tmp_path / "tiny")
    artifact = Artifact.open(tmp_path / "tiny")
    assert (artifact.manifest.target, artifact.manifest.backend, artifact.manifest.platform["chip"]) == ("cuda", "inductor_cuda", "sm_90")
    with pytest.raises(ArtifactError, match=r"is for a GPU of compute capability 9\.0: torch .* has no CUDA; install torch .*--target cpu"):
        choose_device(artifact, "auto")
    with pytest.raises(SpecError, match=r"--device emulated: .* was built for cuda; legal are auto and cuda"):
        choose_device(artifact, "emulated")
