"""runtime/engine_groups.py: dp groups that step by themselves answer as one engine, and none waits for another."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support import optional, ranks, tiny
from support import toy_device as toy
from support.once import made_once
from support.servers import Server

from npucompile.graphs.errors import RequestError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.distributed.control_plane import RankError
from npucompile.runtime.distributed.sharded_executor import ShardedExecutor
from npucompile.runtime.engine_groups import EngineGroups, groups_apart, merged
from npucompile.runtime.histogram import Histogram
from npucompile.runtime.request import RECEIVE, ParkedEvent, Request, Sampling
from npucompile.runtime.scheduler.kv_cache_manager import PrefixCacheSettings
from npucompile.server.client import Client
from npucompile.tools.ranks.launch import lead_ranks
from npucompile.tools.ranks.offline import complete
from npucompile.tools.ranks.rank_settings import RankSettings
from npucompile.tools.serve.serving import start_service

PROMPTS = [[3 + (7 * place) % 50 for place in range(length)] for length in (2, 9, 16, 25)]


class Groups:
    """Two engines over toy devices, stepped by hand."""

    def __init__(self) -> None:
        self.served = [toy.serving(prefix_cache=PrefixCacheSettings()) for _ in range(2)]
        self.engines = EngineGroups([served.engine for served in self.served], self.served[0].engine.executor)

    def submit(self, name: str, prompt: tuple[int, ...], **options: Any) -> tuple[int, toy.Collector]:
        """In which group it is now, and its sink."""
        request, sink = Request(name, prompt, 4, Sampling(seed=0), **options), toy.Collector()
        for served in self.served:
            served.device.register(request)
        self.engines.submit(request, sink)
        (group,) = [group for group, served in enumerate(self.served) if served.engine.has(name)]
        return group, sink

    def drain(self) -> None:
        for served in self.served:
            served.drain()


def test_requests_go_where_fewest_are_or_their_prompt_is_known() -> None:
    groups, prompt = Groups(), tuple(range(9))
    places = [groups.submit(f"{n}", (n, n + 1, n + 2)) for n in range(4)]
    assert [group for group, _ in places] == [0, 1, 0, 1]
    groups.drain()
    first, _ = groups.submit("first", prompt)
    other, _ = groups.submit("other", (5, 5, 5))
    assert {first, other} == {0, 1}
    groups.drain()
    # Where they began; a third one there would be more than half as many again and one.
    again = [groups.submit(f"again {n}", (*prompt, n))[0] for n in range(3)]
    assert again == [first, first, other]
    salted, _ = groups.submit("salted", prompt, cache_salt="x")
    skipping, _ = groups.submit("skipping", prompt, skip_reading_prefix_cache=True)
    assert sorted([salted, skipping]) == [0, 1]
    groups.drain()
    for served in groups.served:
        served.engine.stepper.check()


def test_they_are_one_engine_to_who_asks() -> None:
    groups = Groups()
    sinks = [groups.submit(f"{n}", (n, 2, 3))[1] for n in range(3)]
    with pytest.raises(RequestError, match="id '1' is the id of a live request"):
        groups.submit("1", (1, 2, 3))
    assert not groups.engines.cancel("nobody")
    assert groups.engines.cancel("1", "nobody")
    groups.drain()
    for n, sink in enumerate(sinks):
        expected = toy.reference_run(Request(f"{n}", (n, 2, 3), 4, Sampling(seed=0)), 32)
        assert (sink.end.reason, sink.tokens) == (("cancelled", []) if n == 1 else ("length", expected.tokens))
    stats, parts = groups.engines.stats(), [served.engine.stats() for served in groups.served]
    assert stats.keys() == parts[0].keys()
    assert stats["requests_total"] == 3
    assert stats["steps_total"] == sum(part["steps_total"] for part in parts)
    assert stats["bucket_steps"] == {name: sum(part["bucket_steps"].get(name, 0) for part in parts) for name in stats["bucket_steps"]}
    assert stats["dp_requests_running"] == {0: 0, 1: 0}
    assert stats["backends"] == parts[0]["backends"]
    assert groups.engines.flush_prefix_cache()
    assert (groups.engines.alive, groups.engines.failure) == (True, None)
    groups.served[1].engine.give_up("rank 1 died")
    assert (groups.engines.alive, groups.engines.failure) == (False, "rank 1 died")


def test_they_end_together_and_tell_of_all_ends() -> None:
    groups, ends = Groups(), []
    groups.engines.on_end = lambda event: ends.append(event.request_id)
    groups.engines.hold()
    sinks = [groups.submit(f"{n}", (n, 2, 3))[1] for n in range(4)]
    for served in groups.served:
        served.engine.start()
    groups.engines.release()
    groups.engines.stop()
    assert [sink.end.reason for sink in sinks] == ["length"] * 4
    assert sorted(ends) == ["0", "1", "2", "3"]
    with pytest.raises(RequestError, match="it is stopping"):
        groups.engines.submit(Request("late", (1,), 1), toy.Collector())
    assert groups.engines.step_age_s == 0


def test_a_handover_is_told_of_in_the_group_that_has_its_pages() -> None:
    groups, parked = Groups(), list[ParkedEvent]()
    groups.engines.on_parked(parked.append)
    for served in groups.served:
        served.device.receive = lambda group, numbers, ready: ready()
        served.device.landed = lambda group, numbers: None
    places, sinks = dict[str, int](), dict[str, toy.Collector]()
    for n in range(3):
        places[f"{n}"], sinks[f"{n}"] = groups.submit(f"{n}", (n, 2, 3, 4), handover=RECEIVE)
    groups.drain()
    assert {event.request_id: event.group for event in parked} == places
    assert set(places.values()) == {0, 1}
    for name, sink in sinks.items():
        assert sink.tokens == []
        groups.engines.landed(name, filled=False)
        groups.drain()
        assert sink.end.reason == "length"


def test_numbers_are_added_but_for_what_is_a_share_or_the_process() -> None:
    def part(count: int) -> dict[str, Any]:
        histogram = Histogram((1.0,))
        histogram.observe(count)
        return {
            "steps_total": count, "kv_cache_usage_perc": count / 4, "compiles_after_ready_total": 1, "backends": {"a": "b"},
            "bucket_steps": {"both": count, f"of {count}": 0}, "dp_requests_running": {0: count}, "histograms": {"x": histogram.snapshot()},
        }  # fmt: skip

    both = Histogram((1.0,))
    both.observe(1)
    both.observe(2)
    assert merged([part(1), part(2)]) == {
        "steps_total": 3, "kv_cache_usage_perc": 3 / 8, "compiles_after_ready_total": 1, "backends": {"a": "b"},
        "bucket_steps": {"both": 3, "of 1": 0, "of 2": 0}, "dp_requests_running": {0: 1, 1: 2}, "histograms": {"x": both.snapshot()},
    }  # fmt: skip


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A model without experts for two groups, and for one device."""

    def build(home: Path) -> None:
        sizes = {**ranks.SIZES, "model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "num_experts": 0}
        checkpoint = tiny.write_checkpoint(home / "model", seed=7, agreeing=True, intermediate_size=32, **sizes)
        for mesh, name in (("dp=2", "two"), ("", "one")):
            plan = tiny.planned(checkpoint, mesh=mesh, buckets=(1, 4), prefill=(16,), max_model_len=48, num_speculative_tokens=3)
            tiny.built(plan, home / name, fresh=True)

    before = torch.get_num_threads()
    yield made_once(tmp_path_factory, "dense-groups", build)
    torch.set_num_threads(before)


@contextmanager
def ranks_of(artifact: Artifact) -> Iterator[ShardedExecutor]:
    with lead_ranks(artifact, None, RankSettings(threads=1), ranks.environment()) as found:
        assert found is not None
        executor = found.load_executor()
        assert isinstance(executor, ShardedExecutor)
        yield executor


def test_only_groups_over_which_nothing_is_split_are_apart(dense: Path, sharded: Any) -> None:
    assert [groups_apart(Artifact.open(path).manifest) for path in (dense / "two", dense / "one", sharded("dp=2"))] == [True, False, False]


def test_a_group_of_ranks_steps_while_the_others_do_not(dense: Path) -> None:
    artifact = Artifact.open(dense / "two")
    alone = [c.token_ids for c in complete(CpuExecutor(Artifact.open(dense / "one")), PROMPTS, Sampling(), 8, frozenset())]

    def serve(executor: ShardedExecutor) -> None:
        _, second = executor.of_groups()
        with mock.patch.object(executor.local, "launch", side_effect=AssertionError("rank 0 is not of this group")):
            assert [completion.token_ids for completion in complete(second, PROMPTS, Sampling(), 8, frozenset())] == alone
        running = start_service(artifact, lambda: executor)
        assert isinstance(running.engine, EngineGroups)
        assert (running.service.model.dp, len(running.engine.engines)) == (2, 2)
        sinks, ended = [toy.Collector() for _ in PROMPTS * 3], threading.Semaphore(0)
        running.engine.on_end = lambda _: ended.release()
        for number, sink in enumerate(sinks):
            running.engine.submit(Request(f"{number}", tuple(PROMPTS[number % 4]), 8), sink)
        for _ in sinks:
            assert ended.acquire(timeout=60)
        assert [tuple(sink.tokens) for sink in sinks] == alone * 3
        each = [engine.stats() for engine in running.engine.engines]
        assert min(part["requests_total"] for part in each) > 0
        assert running.engine.stats()["requests_total"] == len(sinks)
        (rank,) = [pid for pid in ranks.children_of(os.getpid()) if b"tools.ranks.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(rank, signal.SIGKILL)
        ranks.eventually(lambda: all(engine.failure for engine in running.engine.engines))
        assert "rank 1 of mesh dp=2 died" in (running.engine.failure or "")
        executor.refresh()

    died = r"rank 1 of mesh dp=2 died: process \d+ was killed by signal 9"
    with pytest.raises(RankError, match=died), ranks_of(artifact) as executor:
        serve(executor)


@pytest.mark.long
def test_servers_of_pairs_have_groups_that_step_by_themselves(dense: Path) -> None:
    optional.transfer_engine()
    alone = [c.token_ids for c in complete(CpuExecutor(Artifact.open(dense / "one")), PROMPTS, Sampling(), 8, frozenset())]

    async def ask(url: str) -> list[tuple[int, ...]]:
        async with await Client.connect(url) as client:
            streams = [client.create(prompt, max_output_tokens=8, ignore_eos=True) for prompt in PROMPTS * 3]
            return [tuple((await stream.completion()).token_ids) for stream in streams]

    with ExitStack() as stack:
        prefill = stack.enter_context(closing(Server(dense / "two", "--no-build", "--role", "prefill")))
        decode = stack.enter_context(closing(Server(dense / "two", "--no-build", "--role", "decode", "--prefill", prefill.http)))
        ranks.eventually(lambda: "kv_transfer_connections 1.0" in decode.metrics())
        assert asyncio.run(ask(decode.url)) == alone * 3
        assert "kv_transfer_requests_total 12.0" in decode.metrics()
        assert "kv_transfer_rooms 0.0" in prefill.metrics()
