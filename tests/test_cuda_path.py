"""The path of an artifact for a GPU, from the build to tokens, over `fake_cuda`: all of it but the GPU and its compiler."""

from __future__ import annotations

from contextlib import closing

import pytest
from support import tiny
from support.fake_cuda import FakeCuda

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.lowering.cuda.device import CudaDevice
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.device_executor import DeviceExecutor
from npucompile.runtime.request import Sampling
from npucompile.tools.serve import offline
from npucompile.tools.serve.weights import rank_params

PROMPTS = [[1, 2, 3], [9] * 21, [200, 101], [7]]


@pytest.fixture(scope="module")
def artifact(tiny_checkpoint, tmp_path_factory):
    out = tmp_path_factory.mktemp("cuda") / "tiny"
    tiny.built(tiny.planned(tiny_checkpoint, target="cuda", backend=None, checkpoint_slots=None), out)
    return Artifact.open(out)


def opened(artifact, cuda, cache, report=lambda *_: None):
    def load(wanted):
        return rank_params(artifact, 0, checkpoint=None, wanted=wanted, progress=tiny.QUIET)

    return DeviceExecutor(artifact, CudaDevice(cuda, 0), load, cache_dir=cache, step_timeout_s=60, report=report)


def test_a_server_of_a_gpu_writes_what_one_of_this_cpu_writes(artifact, tiny_artifact, tmp_path):
    """In float32, whose margins between tokens exceed what sums in another order change. Drafts are verified and steps run ahead."""
    cuda, outcomes = FakeCuda(), []
    with closing(opened(artifact, cuda, tmp_path, lambda bucket, seconds, outcome: outcomes.append(outcome))) as executor:
        assert executor.backends == {bucket.name: "inductor_cuda" for bucket in executor.buckets}
        assert executor.run_ahead == 1
        got = offline.complete(executor, PROMPTS, Sampling(), 12, frozenset())
        # One graph a bucket, and nothing is compiled or captured after that.
        assert outcomes == ["compiled"] * len(executor.buckets)
        assert cuda.log.count("capture") == len(executor.buckets)
        assert "replay" not in cuda.log[: len(cuda.log) - cuda.log[::-1].index("capture")]
        assert executor.compiles() == 0
        on_gpu = [completion.token_ids for completion in got]
    on_cpu = offline.complete(CpuExecutor(Artifact.open(tiny_artifact)), PROMPTS, Sampling(), 12, frozenset())
    assert on_gpu == [completion.token_ids for completion in on_cpu]
    again = []
    with closing(opened(artifact, FakeCuda(), tmp_path, lambda bucket, seconds, outcome: again.append(outcome))):
        assert again == ["cached"] * len(artifact.manifest.graphs), "a second start compiles nothing"


def test_a_gpu_of_another_capability_is_refused(artifact, tmp_path):
    from npucompile.graphs.errors import LoweringError

    cuda = FakeCuda("86")
    with pytest.raises(LoweringError, match=r"for compute capability 9\.0, and cuda:0 \(Fake GPU\) has 8\.6"):
        opened(artifact, cuda, tmp_path)
    cuda.close()
