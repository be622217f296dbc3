"""The pools of servers of several ranks: real ranks in processes, each with the real transfer engine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import optional, ranks, servers, tiny
from support.handovers import Server, hand_over
from support.once import made_once

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.distributed.control_plane import RankError
from npucompile.runtime.executor import Executor
from npucompile.runtime.kv_transfer.lease import clock_s
from npucompile.runtime.kv_transfer.opening import open_pools
from npucompile.runtime.kv_transfer.transfer_engine import TransferError
from npucompile.runtime.request import Sampling
from npucompile.tools.ranks.launch import lead_ranks
from npucompile.tools.ranks.offline import complete
from npucompile.tools.ranks.rank_settings import RankSettings

PROMPTS = [[3 + (7 * place) % 50 for place in range(length)] for length in (2, 16, 17, 18, 25)]
"""Around a page of 16 tokens, of which a handover moves all but the last."""


@pytest.fixture(scope="module", autouse=True)
def needed() -> Iterator[None]:
    optional.transfer_engine()
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


Artifacts = Callable[[str], Path]


def by_mesh(factory: pytest.TempPathFactory, name: str, drafts: int, cache: str = "auto", **sizes: Any) -> Artifacts:
    """Artifacts of one checkpoint by mesh, with pages for both requests of a handover."""

    def build(home: Path, mesh: str) -> None:
        checkpoint = tiny.write_checkpoint(home / "model", seed=7, agreeing=bool(drafts), **sizes)
        options = {"buckets": (1, 4), "prefill": (16,), "max_model_len": 48, "num_speculative_tokens": drafts, "kv_cache_dtype": cache}
        tiny.built(tiny.planned(checkpoint, mesh=mesh, **options), home / "artifact", fresh=True)

    return lambda mesh: made_once(factory, f"{name}-{mesh}", lambda home: build(home, mesh)) / "artifact"


@pytest.fixture(scope="module")
def paired(tmp_path_factory: pytest.TempPathFactory) -> Artifacts:
    """Of a hybrid with three drafts, whose ranks share heads."""
    return by_mesh(tmp_path_factory, "paired", 3, **ranks.SIZES)


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Artifacts:
    """Of a model with latent attention, whose ranks hold all of each page."""
    from support import oracle  # after transformers has been told that there is no torch_npu

    fields = oracle.latent(2, vocab_size=tiny.VOCAB, architectures=["DeepseekV3ForCausalLM"])
    return by_mesh(tmp_path_factory, "latent", 0, **dict.fromkeys(tiny.CONFIG) | fields)


@pytest.fixture(scope="module")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> Artifacts:
    """Of a GLM-5 whose latents, packed with their scales, and keys of indexers are int8."""
    from support import oracle

    fields = oracle.CASES["pairs"] | {"vocab_size": tiny.VOCAB, "architectures": ["GlmMoeDsaForCausalLM"]}
    return by_mesh(tmp_path_factory, "rounded", 0, "int8", **dict.fromkeys(tiny.CONFIG) | fields)


@contextmanager
def cluster(artifact: Path) -> Iterator[tuple[Executor, Artifact]]:
    opened = Artifact.open(artifact)
    with lead_ranks(opened, None, RankSettings(threads=1), ranks.environment()) as found:
        assert found is not None
        yield found.load_executor(), opened


def check_tokens(executor: Executor, artifact: Artifact) -> set[tuple[int, int]]:
    """Hands prompts over from one request's pages and slot to another one's, which are in another group where there are two."""
    alone = [list(completion.token_ids) for completion in complete(executor, PROMPTS, Sampling(), 6, frozenset())]
    server, groups = Server(executor, artifact), set()
    assert len(set(server.pools.sessions)) == len(server.pools.ranks) == executor.control_plane.mesh.size
    for prompt, expected in zip(PROMPTS, alone, strict=True):
        server.start()
        assert hand_over(server, server, prompt) == expected
        groups.add((server.parked["source"].group, server.parked["target"].group))
    server.pools.close()
    return groups


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=2"])
def test_tokens_after_a_handover_are_those_without(mesh: str, paired: Artifacts) -> None:
    with cluster(paired(mesh)) as opened:
        assert check_tokens(*opened) == {(0, 1)}


def check_reasons(executor: Executor, artifact: Artifact) -> None:
    """What a rank cannot write is its reason, and service goes on."""
    (alone,) = complete(executor, PROMPTS[2:3], Sampling(), 6, frozenset())
    server = Server(executor, artifact)
    peer, sessions = server.peer, server.pools.sessions
    server.compute(PROMPTS[2])
    tokens = server.reserve(PROMPTS[2])
    own, unknown = peer.instance.addresses[0], (4096,) * len(peer.instance.pools)
    server.peer = peer._replace(instance=replace(peer.instance, addresses=(own, unknown)))
    assert f"segments to {sessions[1]} cannot be written" in server.write(server)
    server.peer = peer._replace(sessions=[sessions[0], "127.0.0.1:1"])
    assert "segments to 127.0.0.1:1 cannot be written" in server.write(server)
    # Neither rank writes once the lease is over, or under a session of before.
    server.peer, lease, server.lease = peer, server.lease, server.pools.lease()
    assert "are not written any more" in server.write(server)
    server.lease.extend(clock_s() + 60)
    server.pools.reopen(server.reasons.put)
    assert server.reasons.get(timeout=60) == ""
    assert not set(sessions) & set(server.pools.sessions)
    for one in range(2):
        server.peer = peer._replace(sessions=[*server.pools.sessions[:one], sessions[one], *server.pools.sessions[one + 1 :]])
        assert f"segments to {sessions[one]} cannot be written" in server.write(server)
    server.peer, server.lease, reserved = peer._replace(sessions=server.pools.sessions), lease, server.parked["target"]
    server.parked["target"] = reserved._replace(pages=(*reserved.pages, 1))
    assert server.write(server) == "1 pages were computed, and there are 2 for them"
    server.parked["target"] = reserved
    assert server.write(server) == ""
    server.free()
    server.land()
    assert tuple(tokens) == alone.token_ids
    server.pools.close()


def lose_a_rank(executor: Executor, artifact: Artifact) -> None:
    """Kills rank 1 while it has a write to make, and looks what is said of that, and of the next one."""
    server = Server(executor, artifact)
    server.compute(PROMPTS[2])
    server.reserve(PROMPTS[2])
    (rank,) = [pid for pid in ranks.children_of(os.getpid()) if b"tools.ranks.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(rank, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as thread:
        reason = thread.submit(server.write, server)
        assert not wait([reason], timeout=0.5).done
        os.kill(rank, signal.SIGKILL)
        assert "rank 1 was lost" in reason.result()
    assert "rank 1 was lost" in server.write(server)
    server.pools.close()
    assert server.reasons.empty()
    executor.refresh()


class Engineless:
    """A transfer engine of rank 0 that starts anywhere."""

    session = "nowhere"

    def register(self, memory: object) -> None:
        pass


def check_engines(executor: Executor) -> None:
    """A rank that cannot open its engine is named."""
    with (
        mock.patch("npucompile.runtime.kv_transfer.opening.Mooncake", return_value=Engineless()),
        pytest.raises(TransferError, match=r"rank 1: .*203\.0\.113\.1"),
    ):
        open_pools(executor, "203.0.113.1")


def test_two_ranks_hand_over_until_one_is_lost(paired: Artifacts) -> None:
    """In one test, because a process leads one set of ranks at a time, and starting them takes longest."""

    def serve(executor: Executor, artifact: Artifact) -> None:
        assert check_tokens(executor, artifact) == {(0, 0)}
        check_reasons(executor, artifact)
        check_engines(executor)
        lose_a_rank(executor, artifact)

    died = r"rank 1 of mesh tp=2 died: process \d+ was killed by signal 9"
    with pytest.raises(RankError, match=died), cluster(paired("tp=2")) as opened:
        serve(*opened)


@pytest.mark.long
@pytest.mark.parametrize(("prefill", "decode"), [("tp=2", "tp=2"), ("dp=2,tp=2", "tp=2"), ("", "dp=2"), ("dp=2", "")])
def test_servers_of_several_ranks_are_a_pair(prefill: str, decode: str, paired: Artifacts) -> None:
    """Two commands, each with ranks in processes of their own, and one server of both roles."""
    check_pair(paired(prefill), paired(decode), PROMPTS)


@pytest.mark.long
@pytest.mark.parametrize(("prefill", "decode"), [("tp=2", ""), ("", "tp=2"), ("dp=2", "tp=2")])
def test_servers_of_latents_are_a_pair_whatever_their_ranks(prefill: str, decode: str, latent: Artifacts) -> None:
    check_pair(latent(prefill), latent(decode), PROMPTS)


def test_a_prefill_and_a_decode_server_of_int8_latents_say_what_one_says(rounded: Artifacts) -> None:
    """Latents with their scales, keys of indexers and scales of those travel, each a pool of its own."""
    artifact = Artifact.open(rounded(""))
    pools = {(region.name.rpartition(".")[2], region.dtype) for region in CpuExecutor(artifact).regions}
    assert pools == {("packed", "int8"), ("index", "int8"), ("index_scale", "float16")}
    alone = [list(completion.token_ids) for completion in complete(CpuExecutor(artifact), PROMPTS, Sampling(), 6, frozenset())]
    prefill, decode = (Server(CpuExecutor(artifact), artifact) for _ in range(2))
    with closing(prefill.pools), closing(decode.pools):
        for prompt, expected in zip(PROMPTS, alone, strict=True):
            prefill.start()
            decode.start()
            assert hand_over(prefill, decode, prompt) == expected


@pytest.mark.long
@pytest.mark.parametrize(("prefill", "decode"), [("tp=2", ""), ("", "dp=2")])
def test_servers_of_int8_latents_are_a_pair(prefill: str, decode: str, rounded: Artifacts) -> None:
    check_pair(rounded(prefill), rounded(decode), PROMPTS)


@pytest.mark.long
def test_emulated_devices_of_two_ranks_are_a_pair(npu_artifact: Artifacts) -> None:
    """Of one mesh: others round otherwise, since their experts are on other ranks."""
    prompts = [PROMPTS[0], [3 + (7 * place) % 50 for place in range(120)]]
    check_pair(npu_artifact("tp=2"), npu_artifact("tp=2"), prompts, "--device", "emulated")


def check_pair(prefill: Path, decode: Path, prompts: list[list[int]], *options: object) -> None:
    """Compares the tokens of a pair with those of a server of the decode server's artifact alone."""
    with ExitStack() as stack:

        def started(artifact: Path, *role: object) -> servers.Server:
            return stack.enter_context(closing(servers.Server(artifact, "--no-build", *options, *role)))

        first = started(prefill, "--role", "prefill")
        second = started(decode, "--role", "decode", "--prefill", first.http)
        ranks.eventually(lambda: "kv_transfer_connections 1.0" in second.metrics())
        answers = [asyncio.run(second.ask(6, prompt)) for prompt in prompts]
        assert f"npucompile:kv_transfer_requests_total {len(prompts)}.0" in second.metrics()
        assert "npucompile:kv_transfer_rooms 0.0" in first.metrics()
        for server in (first, second):
            assert "npucompile:compiles_after_ready_total 0" in server.metrics()
    with closing(servers.Server(decode, "--no-build", *options)) as alone:
        assert answers == [asyncio.run(alone.ask(6, prompt)) for prompt in prompts]
