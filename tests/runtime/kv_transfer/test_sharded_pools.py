"""The pools of servers of several ranks: real ranks in processes, each with the real transfer engine."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import optional, ranks, tiny
from support.once import made_once

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.distributed.control_plane import RankError
from npucompile.runtime.engine import Engine
from npucompile.runtime.executor import Executor
from npucompile.runtime.kv_transfer.layout import instance_of
from npucompile.runtime.kv_transfer.messages import Ready
from npucompile.runtime.kv_transfer.opening import open_pools
from npucompile.runtime.kv_transfer.pools import Peer, Pools
from npucompile.runtime.kv_transfer.transfer_engine import TransferError
from npucompile.runtime.request import RECEIVE, SEND, ParkedEvent, Request, Sampling, TokenEvent
from npucompile.tools.ranks.launch import lead_ranks
from npucompile.tools.ranks.offline import complete
from npucompile.tools.ranks.rank_settings import RankSettings

WAIT_S = 60
PROMPTS = [[3 + (7 * place) % 50 for place in range(length)] for length in (2, 16, 17, 18, 25)]
"""Around a page of 16 tokens, of which a handover moves all but the last."""


@pytest.fixture(autouse=True)
def needed() -> Iterator[None]:
    optional.transfer_engine()
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def paired(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Artifacts by mesh with pages for both requests of a handover."""

    def build(home: Path, mesh: str) -> None:
        checkpoint = tiny.write_checkpoint(home / "model", seed=7, agreeing=True, **ranks.SIZES)
        plan = tiny.planned(checkpoint, buckets=(1, 4), prefill=(16,), max_model_len=48, mesh=mesh)
        tiny.built(plan, home / "artifact", fresh=True)

    return lambda mesh: made_once(tmp_path_factory, f"paired-{mesh}", lambda home: build(home, mesh)) / "artifact"


@contextmanager
def cluster(artifact: Path) -> Iterator[tuple[Executor, Artifact]]:
    opened = Artifact.open(artifact)
    with lead_ranks(opened, None, RankSettings(threads=1), ranks.environment()) as found:
        assert found is not None
        yield found.load_executor(), opened


class Own:
    """A server that hands over to itself: from one request's pages and slot to another one's."""

    def __init__(self, executor: Executor, pools: Pools, peer: Peer) -> None:
        self.executor, self.pools, self.peer = executor, pools, peer
        self.engine = Engine(executor, refresh_every_s=None)
        self.parked: dict[str, ParkedEvent] = {}
        self.engine.stepper.on_parked = lambda event: self.parked.update({event.request_id: event})
        self.reasons: queue.SimpleQueue[str] = queue.SimpleQueue()

    def run(self) -> None:
        while self.engine.step():
            pass

    def begin(self, prompt: list[int]) -> list[int]:
        """Computes a prompt, and finds pages for it elsewhere; returns where its tokens will be."""
        tokens: list[int] = []
        request = Request("source", tuple(prompt), 1, handover=SEND)
        self.engine.submit(request, lambda event: None)
        self.engine.submit(
            replace(request, id="target", max_tokens=6, handover=RECEIVE),
            lambda event: tokens.extend(event.token_ids) if isinstance(event, TokenEvent) else None,
        )
        self.run()
        return tokens

    def write(self) -> str:
        source, target = self.parked["source"], self.parked["target"]
        ready = Ready(1, target.group, list(target.pages), target.known, target.slot)
        self.pools.write(source, self.peer, ready, self.reasons.put)
        return self.reasons.get(timeout=WAIT_S)

    def end(self) -> None:
        self.engine.cancel("source")
        self.engine.landed("target")
        self.run()


@pytest.mark.parametrize("mesh", ["tp=2", pytest.param("dp=2", marks=pytest.mark.long), pytest.param("dp=2,tp=2", marks=pytest.mark.long)])
def test_tokens_after_a_handover_are_those_without(mesh: str, paired: Callable[[str], Path]) -> None:
    with cluster(paired(mesh)) as (executor, artifact):
        alone = [list(completion.token_ids) for completion in complete(executor, PROMPTS, Sampling(), 6, frozenset())]
        pools = open_pools(executor, "127.0.0.1")
        described = replace(instance_of(artifact.manifest), ranks=pools.ranks)
        assert len(set(pools.sessions)) == len(pools.ranks) == len(described.ranks)
        groups = set()
        for prompt, expected in zip(PROMPTS, alone, strict=True):
            server = Own(executor, pools, Peer(described, pools.sessions))
            tokens = server.begin(prompt)
            assert (server.write(), tokens) == ("", [])
            server.end()
            assert tokens == expected
            groups.add((server.parked["source"].group, server.parked["target"].group))
        assert groups == ({(0, 1)} if "dp" in mesh else {(0, 0)})
        pools.close()


def test_what_a_rank_cannot_write_is_its_reason_and_service_goes_on(paired: Callable[[str], Path]) -> None:
    with cluster(paired("tp=2")) as (executor, artifact):
        pools = open_pools(executor, "127.0.0.1")
        (alone,) = complete(executor, PROMPTS[2:3], Sampling(), 6, frozenset())
        described = replace(instance_of(artifact.manifest), ranks=pools.ranks)
        unknown = tuple(replace(region, address=4096) for region in pools.ranks[1])
        server = Own(executor, pools, Peer(replace(described, ranks=(pools.ranks[0], unknown)), pools.sessions))
        tokens = server.begin(PROMPTS[2])
        assert f"segments to {pools.sessions[1]}: Mooncake returned" in server.write()
        server.peer = Peer(described, [pools.sessions[0], "127.0.0.1:1"])
        assert "segments to 127.0.0.1:1: Mooncake returned" in server.write()
        server.peer = Peer(described, pools.sessions)
        whole = server.parked["target"]
        server.parked["target"] = whole._replace(pages=(*whole.pages, 1))
        assert server.write() == "1 pages were computed, and there are 2 for them"
        server.parked["target"] = whole
        assert server.write() == ""
        server.end()
        assert tuple(tokens) == alone.token_ids
        pools.close()


def lose_a_rank(executor: Executor, artifact: Artifact) -> None:
    """Kills rank 1 while it has a write to make, and looks what is said of that, and of the next one."""
    pools = open_pools(executor, "127.0.0.1")
    server = Own(executor, pools, Peer(replace(instance_of(artifact.manifest), ranks=pools.ranks), pools.sessions))
    server.begin(PROMPTS[2])
    (rank,) = [pid for pid in ranks.children_of(os.getpid()) if b"tools.ranks.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(rank, signal.SIGSTOP)
    source, target = server.parked["source"], server.parked["target"]
    ready = Ready(1, target.group, list(target.pages), target.known, target.slot)
    pools.write(source, server.peer, ready, server.reasons.put)
    with pytest.raises(queue.Empty):
        server.reasons.get(timeout=0.5)
    os.kill(rank, signal.SIGKILL)
    assert "rank 1 was lost" in server.reasons.get(timeout=WAIT_S)
    assert "rank 1 was lost" in server.write()
    pools.close()
    assert server.reasons.empty()
    executor.refresh()


def test_a_rank_that_is_lost_ends_its_write(paired: Callable[[str], Path]) -> None:
    died = r"rank 1 of mesh tp=2 died: process \d+ was killed by signal 9"
    with pytest.raises(RankError, match=died), cluster(paired("tp=2")) as opened:
        lose_a_rank(*opened)


def test_a_rank_that_cannot_open_its_engine_is_named(paired: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("npucompile.runtime.kv_transfer.opening.Mooncake", lambda host, protocol: Engineless())
    with cluster(paired("tp=2")) as (executor, _), pytest.raises(TransferError, match=r"rank 1: .*203\.0\.113\.1"):
        open_pools(executor, "203.0.113.1")


class Engineless:
    """A transfer engine of rank 0 that starts anywhere."""

    session = "nowhere"

    def register(self, memory: object) -> None:
        pass
