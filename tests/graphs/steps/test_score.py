"""graphs/steps/score.py: a prompt is scored in chunks as by one pass, and its graphs are proved on this machine and on emulated ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import ranks, served, tiny

from npucompile.graphs.errors import SpecError
from npucompile.graphs.steps.score import SCORE
from npucompile.graphs.steps.table import kind_of
from npucompile.graphs.types import Bucket
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.steps.pack import pack
from npucompile.runtime.steps.rows import PrefillRow
from npucompile.tools.builder import driver, pool
from npucompile.tools.prove import npu
from npucompile.tools.prove.mesh import verify_mesh

TEXT = [7, 1, 99, 30, 200, 5, 5, 81, 12, 3, 64]


def test_steps_of_a_kind_that_nobody_knows_are_refused() -> None:
    with pytest.raises(SpecError, match=r"bucket sing-b1-q2: kind is 'sing'; legal are decode, prefill, encode, score"):
        kind_of(Bucket("sing", 1, 2))


def scores(executor: Any, bucket: Bucket, start: int, end: int) -> tuple[list[int], Any]:
    """The tokens that follow those of a chunk of the text, and their log probabilities."""
    following = TEXT[end] if end < len(TEXT) else -1
    row = PrefillRow(TEXT[start:end], start, (1, 2), 1, 1, following, logprobs=True)
    inputs = pack(bucket, [row], executor.limits, max_logprobs=executor.max_logprobs)
    (outputs,) = executor.launch(bucket, [inputs]).result()
    return outputs["tokens"][0, : end - start].tolist(), torch.from_numpy(outputs["chosen_logprobs"])[0, : end - start]


@pytest.mark.parametrize("drafts", [0, 2])
def test_a_prompt_is_scored_in_chunks_as_by_one_pass(tmp_path: Any, drafts: int) -> None:
    checkpoint = tiny.write_checkpoint(tmp_path / "model")
    sizes = {"buckets": (1,), "score": (8,), "max_model_len": 32}
    tiny.built(tiny.planned(checkpoint, **sizes, num_speculative_tokens=drafts), tmp_path / "out")
    executor = CpuExecutor(Artifact.open(tmp_path / "out"))
    tokens, found = zip(*(scores(executor, SCORE.bucket(1, 8), *ends) for ends in ((0, 3), (3, 11))), strict=True)
    logits = served.OneDevice.of(checkpoint, "none", torch.float32).run(TEXT).logits
    text = [*TEXT[1:], int(logits[-1].argmax())]
    assert [token for own in tokens for token in own] == text
    right = torch.log_softmax(logits, -1).gather(1, torch.tensor(text)[:, None])[:, 0]
    torch.testing.assert_close(torch.cat(found), right, atol=1e-5, rtol=1e-5)


def test_ranks_give_what_one_device_gives(tmp_path: Any) -> None:
    checkpoint = tiny.write_checkpoint(tmp_path / "model", **ranks.SIZES)
    tiny.built(tiny.planned(checkpoint, buckets=(1,), score=(8,), max_model_len=32, mesh="dp=2,tp=2"), tmp_path / "out")
    measured = verify_mesh(Artifact.open(tmp_path / "out"), tiny.QUIET)["score-b1-q8"]
    assert measured["rows"] > 1
    assert 0 < measured["logits_error"] < 1e-5


def test_its_graphs_for_npus_are_legal_and_proved(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By small models on emulated ranks, one device and random steps, which its record makes."""
    checkpoint = tiny.write_checkpoint(tmp_path / "model", seed=7, agreeing=True, **ranks.NPU_SIZES)
    plan = tiny.planned_device(checkpoint, buckets=(2,), score=(8,), max_logprobs=4)
    monkeypatch.setattr(pool, "run", tiny.compile_once)
    driver.build(plan, tmp_path / "out", tmp_path / "cache", tiny.QUIET, jobs=1)
    assert "score-b1-q8" in [entry.bucket.name for entry in Artifact.open(tmp_path / "out").manifest.graphs]
    traces, record = list[Any](), npu.record_trace
    monkeypatch.setattr(npu, "record_trace", lambda *args: traces.append(record(*args)) or traces[-1])
    measured = npu.verify_device(Artifact.open(tmp_path / "out"), tmp_path, tiny.QUIET, steps=1)
    assert {step.case.bucket.kind for trace in traces for step in trace.steps} == {"prefill", "score", "decode"}
    assert any(name.startswith("score-") and name.endswith(" small") for name in measured)
