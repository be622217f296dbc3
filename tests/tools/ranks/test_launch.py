"""tools/ranks/launch.py: ranks are started, compared and ended, and together they generate what one device generates."""

from __future__ import annotations

import os
import platform
import re
import signal
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from support import ranks, tiny

from npucompile.graphs.errors import ArtifactError, ArtifactMissing, SpecError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.distributed.control_plane import RankError
from npucompile.runtime.request import Sampling
from npucompile.tools.cli import Home
from npucompile.tools.ranks import launch as module
from npucompile.tools.ranks.launch import (
    check_world_size,
    lead_ranks,
    open_named_artifact,
    rank_identity,
)
from npucompile.tools.ranks.offline import complete
from npucompile.tools.ranks.processes import RankProcesses
from npucompile.tools.ranks.rank_settings import RankSettings
from npucompile.tools.ranks.torchrun import launcher_config

PROMPTS = [[1, 2, 3], [9] * 11, list(range(20)), [0], [255]]
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
WAIT_S = 60

pytestmark = pytest.mark.usefixtures("threads")


def test_another_number_of_ranks_than_the_mesh_has_is_refused(sharded):
    artifact = Artifact.open(sharded("tp=2"))
    assert check_world_size(artifact, None).size == 2
    with pytest.raises(SpecError, match=r"is for mesh tp=2, 2 ranks; the launcher started 4"):
        check_world_size(artifact, launcher_config(TORCHRUN, RankSettings()))
    with pytest.raises(SpecError, match=r"is for mesh 1, 1 ranks; the launcher started 4"):
        check_world_size(Artifact.open(sharded("")), launcher_config(TORCHRUN, RankSettings()))


def test_what_a_launcher_runs_is_named_and_there(tmp_path, sharded):
    home = Home(tmp_path, {})
    with pytest.raises(SpecError, match="name an artifact"):
        open_named_artifact(home, None)
    with pytest.raises(ArtifactMissing):
        open_named_artifact(home, str(tmp_path / "nothing"))
    assert open_named_artifact(home, str(sharded("tp=2"))).manifest.mesh == "tp=2"


# --- ranks ---


@contextmanager
def cluster_of(artifact, **settings):
    with lead_ranks(artifact, None, RankSettings(threads=1, **settings), ranks.environment()) as cluster:
        yield cluster


def tokens(executor, count=6):
    return [completion.token_ids for completion in complete(executor, PROMPTS, Sampling(), count, frozenset())]


def test_one_device_needs_no_other_ranks(sharded):
    with lead_ranks(Artifact.open(sharded("")), None, RankSettings(), {}) as cluster:
        assert cluster is None


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2"])
@pytest.mark.short_cases("tp=2")
def test_ranks_generate_what_one_device_generates_and_a_killed_rank_ends_them_all(sharded, mesh):
    """Five prompts over two groups are an uneven share, so one group is idle in the end."""
    expected = tokens(CpuExecutor(Artifact.open(sharded(""))))
    processes = {}
    with pytest.raises(RankError) as caught, cluster_of(Artifact.open(sharded(mesh))) as cluster:  # noqa: PT012
        processes |= {pid: None for pid in ranks.children_of(os.getpid()) if b"npucompile.tools.ranks.rank" in command_of(pid)}
        executor = cluster.load_executor()
        assert tokens(executor) == expected
        assert executor.compiles() == 0
        victim = max(processes)
        threading.Timer(0.3, os.kill, (victim, signal.SIGKILL)).start()
        while True:
            tokens(executor)
    last = cluster.control_plane.mesh.size - 1
    assert f"rank {last} of mesh {mesh} died: process {victim} was killed by signal 9 (SIGKILL)" in str(caught.value)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in processes)


def command_of(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def test_ranks_with_other_artifacts_are_refused(sharded, tmp_path, monkeypatch, capfd):
    other = tiny.published(tiny.copied(sharded("tp=2"), tmp_path / "other"), lambda manifest, _: replace(manifest, source_digest="another"))
    artifact = Artifact.open(sharded("tp=2"))
    start = RankProcesses.start
    monkeypatch.setattr(RankProcesses, "start", lambda self, path, *rest: start(self, other.path, *rest))
    with pytest.raises(RankError) as caught, cluster_of(artifact):
        pass
    assert f"artifact is {other.digest} on rank 1 and {artifact.digest} on rank 0" in str(caught.value)
    assert f"rank 1: {caught.value}" in capfd.readouterr().err


@pytest.mark.parametrize(("name", "mixed"), [("inductor", False), ("ge", True)])
def test_hosts_of_two_architectures_share_what_knows_none(monkeypatch, name, mixed):
    class Opened:
        digest, manifest = "d", type("M", (), {"mesh": "tp=2", "backend": name, "model": {}})

    identities = []
    for machine, label in (("x86_64", "2.13.0+cpu"), ("aarch64", "2.13.0")):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        monkeypatch.setattr(torch, "__version__", label)
        identities.append(rank_identity(Opened, RankSettings()))
    assert (identities[0] == identities[1]) == mixed


def test_a_rank_that_cannot_start_is_named(sharded, monkeypatch, tmp_path, capfd):
    start = RankProcesses.start
    monkeypatch.setattr(RankProcesses, "start", lambda self, path, *rest: start(self, tmp_path / "gone", *rest))
    with pytest.raises(RankError) as caught, cluster_of(Artifact.open(sharded("tp=2"))):
        pass
    assert re.search(r"rank 1 ended before it was ready: process \d+ ended with status 1; it says why above", str(caught.value))
    assert "rank 1: " in capfd.readouterr().err


def test_ranks_that_do_not_come_are_named(sharded, monkeypatch):
    monkeypatch.setattr(RankProcesses, "start", lambda *_: None)
    with pytest.raises(RankError) as caught, cluster_of(Artifact.open(sharded("tp=2")), join_timeout_s=0.5):
        pass
    assert "ranks 1 of 2 did not come to 127.0.0.1 within 0.5 s" in str(caught.value)


def test_nothing_is_started_for_what_has_no_weights(sharded, tmp_path, monkeypatch):
    def start(*_):
        raise AssertionError("a rank was started")

    monkeypatch.setattr(RankProcesses, "start", start)
    bare = tiny.published(tiny.copied(sharded("tp=2"), tmp_path / "bare"), lambda manifest, _: replace(manifest, weights=None))
    with pytest.raises(ArtifactError, match="built without weights"), lead_ranks(bare, None, RankSettings(), {}):
        pass


def test_cores_are_divided(monkeypatch):
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: range(8))
    for settings, world_size, expected in ((RankSettings(), 3, 2), (RankSettings(), 16, 1), (RankSettings(threads=5), 3, 5)):
        module._divide_threads(settings, world_size)
        assert torch.get_num_threads() == expected
