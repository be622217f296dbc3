"""docs/adding-a-step-kind.md: a kind that nothing ships is traced, lowered, packed, proved and run by what that page adds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import ranks, scoring, served, tiny

from npucompile.graphs.errors import SpecError
from npucompile.graphs.steps.table import kind_of
from npucompile.graphs.types import Bucket
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.steps.pack import pack
from npucompile.runtime.steps.rows import PrefillRow
from npucompile.tools.builder import driver, pool
from npucompile.tools.prove import npu

TEXT = [7, 1, 99, 30, 200, 5, 5, 81, 12, 3, 64]


@pytest.fixture(autouse=True)
def added():
    with scoring.added():
        yield


def test_steps_of_a_kind_that_nobody_knows_are_refused() -> None:
    with pytest.raises(SpecError, match=r"bucket sing-b1-q2: kind is 'sing'; legal are decode, prefill, encode, score"):
        kind_of(Bucket("sing", 1, 2))


def scores(executor: Any, bucket: Bucket, start: int, end: int) -> Any:
    """Of the tokens of a chunk of the text, the log probability of each one that follows."""
    row = PrefillRow(TEXT[start:end], start, (1, 2), 1, 1, TEXT[end], logprobs=True)
    inputs = pack(bucket, [row], executor.limits, max_logprobs=executor.max_logprobs)
    (outputs,) = executor.launch(bucket, [inputs]).result()
    return torch.from_numpy(outputs["chosen_logprobs"])[0, : end - start]


def test_a_prompt_is_scored_in_chunks_as_by_one_pass(tmp_path: Any) -> None:
    checkpoint = tiny.write_checkpoint(tmp_path / "model")
    plan = tiny.planned(checkpoint, buckets=(1,), max_model_len=32, num_speculative_tokens=0)
    tiny.built(scoring.with_scores(plan, 8), tmp_path / "out", fresh=True)
    executor = CpuExecutor(Artifact.open(tmp_path / "out"))
    found = torch.cat([scores(executor, scoring.SCORE.bucket(1, 8), *ends) for ends in ((0, 3), (3, 10))])
    logits = served.OneDevice.of(checkpoint, "none", torch.float32).run(TEXT[:-1]).logits
    right = torch.log_softmax(logits, -1).gather(1, torch.tensor(TEXT[1:])[:, None])[:, 0]
    torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-5)


def test_its_graphs_for_npus_are_legal_and_proved(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By small models on emulated ranks, one device and random steps, which its record makes."""
    checkpoint = tiny.write_checkpoint(tmp_path / "model", seed=7, agreeing=True, **ranks.NPU_SIZES)
    plan = scoring.with_scores(tiny.planned_device(checkpoint, buckets=(2,), num_speculative_tokens=0, max_logprobs=4), 8)
    monkeypatch.setattr(pool, "run", tiny.compile_once)
    driver.build(plan, tmp_path / "out", tmp_path / "cache", tiny.QUIET, jobs=1)
    assert "score-b1-q8" in [entry.bucket.name for entry in Artifact.open(tmp_path / "out").manifest.graphs]
    assert npu.verify_device(Artifact.open(tmp_path / "out"), tmp_path, tiny.QUIET, steps=1)
