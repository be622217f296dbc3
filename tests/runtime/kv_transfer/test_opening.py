"""Pools of executors, opened for peers."""

from __future__ import annotations

from pathlib import Path

import pytest

from npucompile.graphs.errors import SpecError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.kv_transfer.opening import open_pools
from tests.support import optional


def test_the_pools_of_an_executor_in_this_process(tiny_artifact: Path) -> None:
    optional.transfer_engine()
    executor = CpuExecutor(Artifact.open(tiny_artifact))
    pools = open_pools(executor, "127.0.0.1")
    assert pools.ranks == (executor.regions,)
    assert {region.name for region in executor.regions} == {leaf.path for leaf in executor.artifact.manifest.state} - {"request_slots"}
    assert sum(region.nbytes for region in executor.regions) < executor.state_bytes
    (session,) = pools.sessions
    assert session.startswith("127.0.0.1:")
    pools.close()


def test_a_protocol_that_there_is_not_is_refused(tiny_artifact: Path) -> None:
    with pytest.raises(SpecError, match="'infiniband'; legal are"):
        open_pools(CpuExecutor(Artifact.open(tiny_artifact)), "127.0.0.1", "infiniband")
