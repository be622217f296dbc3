"""Handovers between emulated devices: tokens are those of one device, and pages that did not arrive are punished."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
from support import optional, ranks, tiny
from support.handovers import Server, hand_over
from support.once import made_once

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.executor import Executor, ExecutorError
from npucompile.runtime.request import Sampling
from npucompile.tools.builder import driver, pool
from npucompile.tools.progress import Progress
from npucompile.tools.ranks.executors import load_executor
from npucompile.tools.ranks.offline import complete
from npucompile.tools.ranks.rank_settings import RankSettings

PROMPTS = [[3 + (7 * place) % 50 for place in range(length)] for length in (2, 128, 129, 130)]
"""Around a page of 128 tokens, of which a handover moves all but the last."""


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A hybrid of two layers with one draft, for one device."""
    optional.transfer_engine()

    def build(home: Path) -> None:
        checkpoint = tiny.write_checkpoint(home / "model", seed=7, agreeing=True, **ranks.NPU_SIZES)
        plan = tiny.planned_device(checkpoint, mesh="", buckets=(1, 2), prefill=(64,), max_model_len=256)
        with mock.patch.object(pool, "run", tiny.compile_once):
            driver.build(plan, home / "artifact", home / "cache", tiny.QUIET, jobs=1)

    return Artifact.open(made_once(tmp_path_factory, "device-pools", build) / "artifact")


@pytest.fixture
def executors(artifact: Artifact) -> Iterator[list[Executor]]:
    with ExitStack() as stack:
        settings = RankSettings(threads=1, device="emulated")
        yield [load_executor(artifact, settings, stack, Progress(quiet=True)) for _ in range(2)]


def test_tokens_after_a_handover_are_those_without(artifact: Artifact, executors: list[Executor]) -> None:
    alone = [list(completion.token_ids) for completion in complete(executors[0], PROMPTS, Sampling(), 6, frozenset())]
    source, target = (Server(executor, artifact) for executor in executors)
    assert [hand_over(source, target, prompt) for prompt in PROMPTS] == alone
    for server in (source, target):
        assert server.executor.compiles() == 0
        server.pools.close()


@pytest.mark.parametrize("known", [1, 2])
def test_a_page_that_was_not_written_is_punished(artifact: Artifact, executors: list[Executor], known: int) -> None:
    source, target = (Server(executor, artifact) for executor in executors)
    source.compute(PROMPTS[3])
    tokens = target.reserve(PROMPTS[3])
    assert source.write(target, known) == ""
    with pytest.raises(ExecutorError, match="were to come from a peer, and nothing was written to bytes"):
        target.land()
    assert tokens == []
    for server in (source, target):
        server.pools.close()
