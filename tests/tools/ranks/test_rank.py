"""tools/ranks/rank.py: a rank in a real process, with the test as rank 0."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from support import ranks

from npucompile.graphs.types import Bucket
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.distributed.control_plane import ControlPlane
from npucompile.runtime.distributed.messages import encode
from npucompile.runtime.distributed.process_groups import ProcessGroups
from npucompile.runtime.distributed.rendezvous import ADDRESS, CONTROL, RendezvousConfig, accept_ranks, open_store, substore
from npucompile.runtime.steps.pack import pack
from npucompile.tools.ranks.launch import GROUPS, check_world_size, rank_identity
from npucompile.tools.ranks.rank_settings import RankSettings

DECODE = Bucket("decode", 1, 4)


class Rank1:
    """Rank 1 of tp=2, and the test as rank 0."""

    def __init__(self, path, step_timeout_s=30.0):
        self.artifact = Artifact.open(path)
        mesh = check_world_size(self.artifact, None)
        config = RendezvousConfig(0, 2, "127.0.0.1", 0, 2, ranks.TIMEOUT_S, hosts_store=True)
        self.store = open_store(config)
        config = replace(config, port=self.store.port)
        settings = RankSettings(threads=1, step_timeout_s=step_timeout_s)
        command = [sys.executable, "-m", "npucompile.tools.ranks.rank", path, 1, os.getpid()]
        self.process = ranks.spawn(command, ranks.environment(), pickle.dumps((config, settings)))
        arrivals = accept_ranks(config, self.store, rank_identity(self.artifact, settings))
        self.control_plane = ControlPlane(mesh, {rank: arrival.stream for rank, arrival in arrivals.items()})
        self.groups = ProcessGroups(mesh, 0, substore(self.store, config, GROUPS), "127.0.0.1", step_timeout_s)
        self.control_plane.gather([1], "ready", ranks.TIMEOUT_S)

    def ended(self):
        return ranks.finished(self.process, 15)

    def close(self):
        self.control_plane.close()
        self.groups.close()
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start_rank1(sharded):
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(contextlib.closing(Rank1(sharded("tp=2"), **options)))


def test_it_runs_steps_and_stops_when_rank_0_says_so_whatever_signals_it_gets(start_rank1):
    """Ctrl-C and torchrun's SIGTERM reach all ranks; rank 0 ends them in order."""
    rank1 = start_rank1()
    executor = CpuExecutor(rank1.artifact, rank=0)
    inputs = pack(DECODE, [], executor.limits, max_logprobs=executor.max_logprobs)
    for number in range(3):
        rank1.control_plane.send(1, encode("step", step=number, bucket=DECODE.name, inputs=inputs))
        assert executor.launch(DECODE, [inputs]).result()[0]["tokens"].dtype == np.int32
    rank1.process.send_signal(signal.SIGINT)
    rank1.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert rank1.process.poll() is None
    rank1.control_plane.close()
    assert rank1.ended() == (0, "", "")


@pytest.mark.long
def test_it_ends_with_rank_0_even_when_it_waits_for_it_in_a_collective(start_rank1):
    rank1 = start_rank1()
    inputs = pack(DECODE, [], rank1.artifact.manifest.limits, max_logprobs=rank1.artifact.manifest.graphs[0].max_logprobs)
    rank1.control_plane.send(1, encode("step", step=1, bucket=DECODE.name, inputs=inputs))
    time.sleep(0.3)
    rank1.control_plane._peers[1]._stream.shutdown(2)
    status, _, stderr = rank1.ended()
    assert status == 1
    assert "lost rank 0: it closed its connection" in stderr


@pytest.mark.long
def test_it_ends_by_itself_when_nobody_ends_it(start_rank1):
    rank1 = start_rank1()
    began = time.monotonic()
    os.kill(rank1.process.pid, signal.SIGTERM)
    status, _, _ = rank1.ended()
    assert status == 128 + signal.SIGTERM
    assert time.monotonic() - began > 4


def test_it_does_not_wait_for_others_when_the_process_that_started_it_has_ended(sharded):
    config = RendezvousConfig(0, 2, "127.0.0.1", 0, 2, ranks.TIMEOUT_S, hosts_store=True)
    store = open_store(config)
    # Rank 0 says where it listens, and never answers; the parent is another process than the test.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        substore(store, config, CONTROL).set(ADDRESS, str(listener.getsockname()[1]))
        command = [sys.executable, "-m", "npucompile.tools.ranks.rank", sharded("tp=2"), 1, 1]
        given = pickle.dumps((replace(config, port=store.port), RankSettings(threads=1)))
        status, _, stderr = ranks.finished(ranks.spawn(command, ranks.environment(), given))
    assert (status, stderr) == (1, "rank 1: the process that started rank 1 has ended\n")
