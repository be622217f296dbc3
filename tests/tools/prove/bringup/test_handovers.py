"""tools/prove/bringup/handovers.py: bytes that do not arrive are found, on servers of each kind of bucket."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support import optional, tiny
from support.fleet import OneKind

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.kv_transfer.layout import Region, instance_of, located
from npucompile.runtime.kv_transfer.opening import open_pools
from npucompile.runtime.kv_transfer.pools import Pools
from npucompile.tools.prove.bringup.handovers import PROMPTS, Handovers


def read(region: Region, number: int) -> bytes:
    return ctypes.string_at(region.address + number * region.stride_bytes, region.item_bytes)


@pytest.fixture(scope="module")
def server(tiny_artifact: Path) -> Iterator[Handovers]:
    optional.transfer_engine()
    artifact = Artifact.open(tiny_artifact)
    executor = CpuExecutor(artifact)
    with closing(open_pools(executor, "127.0.0.1")) as pools:
        yield Handovers(executor, pools, located(instance_of(artifact.manifest), pools.ranks), read, 60)


def run(server: Handovers) -> Any:
    with tiny.QUIET.bar("handovers", PROMPTS) as bar:
        return server.run(bar)


@pytest.mark.parametrize("kind", ["", "prefill"])
def test_all_bytes_arrive(server: Handovers, kind: str) -> None:
    failures, facts = run(server._replace(executor=OneKind(server.executor, kind)) if kind else server)
    assert failures == []
    # A token, and 17 of them in pages of 16, each with a state.
    assert facts == {"prompts": 2, "compared_bytes": 3 * server.instance.item_bytes("pages") + 2 * server.instance.item_bytes("slots"),
                     "other_tokens": 0}  # fmt: skip


class Losing:
    """Pools that say of a part of what is written that it has arrived, though nobody sent it."""

    def __init__(self, pools: Pools, **parts: Any) -> None:
        self._pools, self._parts = pools, parts
        self.ranks, self.sessions, self.lease = pools.ranks, pools.sessions, pools.lease

    def write(self, source: Any, peer: Any, target: Any, lease: Any, done: Any) -> None:
        changed = msgspec.structs.replace(target, **{name: change(target) for name, change in self._parts.items()})
        self._pools.write(source, peer, changed, lease, done)


@pytest.mark.parametrize(
    ("parts", "pool"),
    [
        ({"known": lambda target: len(target.pages)}, r"pool layers\.1\.\w+"),
        ({"slot": lambda target: target.slot + 1}, r"pool layers\.0\.\w+"),
    ],
    ids=["page", "state"],
)
def test_a_page_or_state_that_does_not_arrive_is_named(server: Handovers, parts: Any, pool: str) -> None:
    (failure,), _ = run(server._replace(pools=Losing(server.pools, **parts)))
    assert failure.assumption == "handovers"
    assert failure.what.startswith("a handover to itself of ")
    assert re.search(rf"\d+ of \d+ bytes of item \d+ of {pool}, at 0x[0-9a-f]+, are not those of item \d+", failure.message)


def test_what_the_engine_says_is_the_failure(server: Handovers) -> None:
    (failure,), _ = run(server._replace(instance=replace(server.instance, addresses=((4096,) * len(server.instance.pools),))))
    assert "cannot be written, says Mooncake" in failure.message
