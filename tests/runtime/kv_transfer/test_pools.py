"""The pools of a pair over the real transfer engine."""

from __future__ import annotations

import itertools
import queue
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs import tree
from npucompile.graphs.types import Leaf, Limits, Mesh
from npucompile.models import registry, sharding_rules
from npucompile.runtime.kv_transfer.layout import Instance, LayoutError, Region, located, regions
from npucompile.runtime.kv_transfer.messages import Ready
from npucompile.runtime.kv_transfer.mooncake import Mooncake
from npucompile.runtime.kv_transfer.pools import LocalPools, Peer, RankWriter, pairs_of
from npucompile.runtime.kv_transfer.segments import Segment
from npucompile.runtime.kv_transfer.transfer_engine import RegisteredMemory
from npucompile.runtime.request import FinishEvent, ParkedEvent, Request, Sampling
from tests.support import optional
from tests.support.pairs import PROMPT, Pair, Pooled, alone

GO = lambda: True  # noqa: E731


def test_over_the_real_engine(tiny_artifact: Path) -> None:
    """Two engines of one process, as Mooncake does not mind."""
    optional.transfer_engine()
    pair = Pair(tiny_artifact)
    engines = [Mooncake("127.0.0.1"), Mooncake("127.0.0.1")]
    pools = [LocalPools(engine, Pooled(own)) for engine, own in zip(engines, (pair.writes.own, pair.instance.pools), strict=True)]
    pair.senders[-1]._pools = pools[0]
    pair.senders[-1]._lease = pools[0].lease()
    pair.senders[-1]._peer = Peer(pair.instance, pools[1].sessions)
    pair.ask(Request("r", PROMPT, 6, Sampling(seed=1)))
    while not (events := pair.results["r"]) or not isinstance(events[-1], FinishEvent):
        pair.go_on()
    assert [token for event in events[:-1] for token in event.token_ids] == alone(tiny_artifact, PROMPT)
    for pool in pools:
        pool.close()


class Unused:
    """A transfer engine that is only told of memory."""

    session = "here"

    def register(self, memory: Sequence[RegisteredMemory]) -> None:
        self.memory = list(memory)


def latents(drafts: int, ranks: int, num_pages: int) -> tuple[tuple[Region, ...], ...]:
    """The pools of V3.2 on each rank, wherever they lie."""
    limits = Limits(128, num_pages, 9, 1024, drafts + 1, drafts)
    state = replace(registry.find("deepseek-v3.2").model, drafting=drafts > 0).state(limits, torch.bfloat16)
    leaves = [Leaf(f"state.{path}", aval) for path, aval in tree.flatten(state)]
    rules, places = sharding_rules.rules(Mesh.parse("tp=2")), itertools.count(1)
    return tuple(regions(leaves, limits, {leaf.path: next(places) << 36 for leaf in leaves}, rules) for _ in range(ranks))


def items(own: Sequence[Region], address: int, nbytes: int) -> list[tuple[str, int]]:
    """The pages that a piece of memory is: whole ones."""
    (region,) = [region for region in own if region.address <= address < region.address + region.nbytes]
    first, rest = divmod(address - region.address, region.stride_bytes)
    count, more = divmod(nbytes, region.item_bytes)
    assert (rest, more, region.item_bytes) == (0, 0, region.stride_bytes)
    return [(region.name, first + place) for place in range(count)]


@given(st.randoms(use_true_random=False), st.sampled_from([(1, 2), (2, 1), (2, 4), (4, 2), (3, 2), (2, 2), (8, 1)]), st.integers(1, 2))
def test_of_unequal_ranks_each_item_of_each_target_is_written_once(randoms: random.Random, sizes: tuple[int, int], groups: int) -> None:
    (tp, target_tp), group = sizes, randoms.randrange(groups)
    sources, targets = latents(1, tp, 40), latents(1, target_tp * groups, 30)
    peer = located(Instance("", 128, 1, target_tp, 1024, (), ((),) * target_tp), targets)
    sessions = [f"host:{rank}" for rank in peer.group(group)]
    pages = [randoms.sample(range(1, count), 7) for count in (40, 30)]
    pairs = pairs_of(ParkedEvent("", 0, tuple(pages[0]), 1), Ready(1, group, pages[1], 2, 3))
    plans = [RankWriter(Unused(), Pooled(own), rank, tp).plan(peer, group, sessions, pairs) for rank, own in enumerate(sources)]
    expected = {(region.name, source): (region.name, target) for region in targets[0] for source, target in pairs[region.axis]}
    for rank in range(len(targets)):
        written: list[tuple[tuple[str, int], tuple[str, int]]] = []
        for own, plan in zip(sources, plans, strict=True):
            for source, target, nbytes in plan.get(f"host:{rank}", ()):
                written += zip(items(own, source, nbytes), items(targets[rank], target, nbytes), strict=True)
        assert sorted(written) == (sorted(expected.items()) if rank in peer.group(group) else [])
    if tp > 1 and tp != target_tp:
        # Each has its share of the work.
        nbytes = [sum(segment.nbytes for own in plan.values() for segment in own) for plan in plans]
        assert max(nbytes) - min(nbytes) <= max(region.item_bytes for region in targets[0]) * 5 * target_tp


def test_what_fits_nothing_is_a_reason_and_nothing_is_written() -> None:
    own = latents(0, 1, 9)
    peer = located(Instance("", 128, 0, 1, 1024, (), ((),)), own)
    with pytest.raises(LayoutError, match="2 pages were computed, and there are 1 for them"):
        pairs_of(ParkedEvent("", 0, (1, 2), 1), Ready(1, 0, [1], 0, 1))
    writer = RankWriter(Unused(), Pooled(own[0]), 0, 1)
    assert "dp group 1; legal are 0 to 0" in writer.write(peer, 1, ["host:0"], {"pages": [(1, 1)]}, GO)
    assert "legal are 1 to 8" in writer.write(peer, 0, ["host:0"], {"pages": [(1, 9)]}, GO)
    for sessions, text in ((["host:0", "host:1"], "2 sessions of 1 ranks"), ([7], "a session 7; legal is a text")):
        with pytest.raises(LayoutError, match=text):
            Peer(peer, sessions).group(0)
    assert writer.plan(peer, 0, ["host:0"], {"pages": []}) == {"host:0": []}


def test_all_writes_of_a_rank_are_waited_for_when_one_cannot_start() -> None:
    waited = []

    class Started:
        def result(self) -> str:
            waited.append(True)
            return ""

    class Half(Unused):
        def write(self, session: str, segments: Sequence[Segment], allowed: Callable[[], bool]) -> Started:
            if session == "host:1":
                raise LayoutError("no way")
            return Started()

    peer = located(Instance("", 128, 0, 2, 1024, (), ((), ())), latents(0, 2, 9))
    writer = RankWriter(Half(), Pooled(latents(0, 1, 9)[0]), 0, 1)
    assert writer.write(peer, 0, ["host:0", "host:1"], {"pages": [(1, 1)]}, GO) == "no way"
    assert waited == [True]


def test_whatever_an_engine_raises_is_a_reason_that_is_told() -> None:
    """Or a room would hold its pages for ever."""
    reasons: queue.SimpleQueue[str] = queue.SimpleQueue()

    class Raises(Unused):
        def write(self, session: str, segments: Sequence[Segment], allowed: Callable[[], bool]) -> Any:
            raise OverflowError(session)

        def reopen(self) -> None:
            raise OverflowError("reopen")

        def close(self) -> None:
            pass

    (own,) = latents(0, 1, 9)
    peer, pools = located(Instance("", 128, 0, 1, 1024, (), ((),)), [own]), LocalPools(Raises(), Pooled(own))
    pools.write(ParkedEvent("", 0, (1, 2), 1), Peer(peer, ["host:0"]), Ready(1, 0, [1, 2], 0, 1), pools.lease(), reasons.put)
    assert reasons.get(timeout=20) == "OverflowError: host:0"
    pools.reopen(reasons.put)
    assert reasons.get(timeout=20) == "OverflowError: reopen"
    pools.close()
