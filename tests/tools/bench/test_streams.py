from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny import QUIET

from npucompile.graphs.errors import NpucompileError, SpecError
from npucompile.graphs.types import Bucket, Limits
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.engine import Engine
from npucompile.runtime.executor import FinishedStep, Inputs
from npucompile.runtime.request import Sampling
from npucompile.tools.bench import streams as bench_streams
from npucompile.tools.bench.report import as_text
from npucompile.tools.bench.serve.outcome import Arrival, StreamOutcome
from npucompile.tools.bench.stats import Spread
from npucompile.tools.bench.streams import Run, StreamLoad, TimedCall, TimedExecutor, row, rows_of, streams, through_stepped
from npucompile.tools.ranks.offline import complete


def outcome(*arrivals: tuple[float, int], ended_s: float = 0.0) -> StreamOutcome:
    """A stream of equal tokens that came at these times."""
    count = sum(tokens for _, tokens in arrivals)
    return StreamOutcome(0, 0.0, 0.0, ended_s, 1, tuple(Arrival(*arrival) for arrival in arrivals), token_ids=(1,) * count)


class Steps:
    """An executor whose every step takes 8 s, 5 of them inside its executable; it counts as it generates, and accepts every draft."""

    vocab_size, max_logprobs, max_ranked, groups, run_ahead, recurrent = 50, 0, 0, 1, 0, False
    fixed_tokens: float | None = None
    segments = None
    any_size: frozenset[str] = frozenset()

    def __init__(self, *, drafts: int = 0, fails: bool = False) -> None:
        self.limits = Limits(16, 33, 1 + 4 * (drafts + 1), 128, drafts + 1, drafts)
        self.buckets = (Bucket("decode", 4, drafts + 1), Bucket("prefill", 1, 32))
        self.now = 0.0
        self.fails = fails
        self.calls: list[TimedCall] = []
        self.backends: dict[str, str] = {}
        self.missing: dict[Bucket, str] = {}

    def clock(self) -> float:
        return self.now

    def launch(self, bucket: Bucket, inputs: Sequence[Inputs]) -> FinishedStep:
        if self.fails and bucket.kind == "decode":
            raise RuntimeError("no")
        self.calls.append(TimedCall(bucket.kind, self.now, 5.0))
        self.now += 8.0
        if bucket.kind == "prefill":
            return FinishedStep([{"tokens": np.full((1, 1), len(self.calls), np.int32)}])
        counts = np.where(inputs[0]["request_slots"] > 0, inputs[0]["drafts"] + 1, 0).astype(np.int32)
        return FinishedStep([{"tokens": np.full((bucket.batch, bucket.q_len), len(self.calls), np.int32), "counts": counts}])

    def refresh(self) -> bool:
        return False

    def compiles(self) -> int:
        return 0

    def serve(self, load: StreamLoad) -> Run:
        return through_stepped(Engine(self, refresh_every_s=None), self.calls, load, self.clock)  # type: ignore[arg-type]


def test_a_stream_through_the_engine_is_timed_token_by_token() -> None:
    steps = Steps()
    run = steps.serve(StreamLoad(1, 10, 4))
    assert run.token_ids == ((1, 2, 3, 4),)
    assert run.outcomes[0].arrivals == ((8.0, 1), (16.0, 1), (24.0, 1), (32.0, 1))
    assert run.tokens_per_s == 4 / 32
    assert (run.first_ms, run.between_ms) == (8e3, 8e3)
    # The prefill is no decode step; the other three are, of which the last is not followed by another. 3 s are not the executable's.
    assert run.steps == ((8.0, 5.0),) * 2


def test_a_stream_with_drafts_gets_several_tokens_at_once() -> None:
    steps = Steps(drafts=2)
    run = steps.serve(StreamLoad(1, 10, 6))
    assert run.token_ids == ((1, 2, 2, 2, 3, 3),)
    # The step that ends the output gives one more than is wanted of it.
    assert run.outcomes[0].arrivals == ((8.0, 1), (16.0, 3), (24.0, 2))
    (record,) = run.records
    assert (record.verify_steps, record.accepted_per_position) == (2, (2, 2))
    assert row(StreamLoad(1, 10, 6), "engine", [run])["acceptance_length"] == 3.0


def test_all_streams_start_together_and_share_steps() -> None:
    steps = Steps()
    run = steps.serve(StreamLoad(3, 10, 5))
    assert [len(ids) for ids in run.token_ids] == [5, 5, 5]
    assert min(outcome.arrivals[0].s for outcome in run.outcomes) == 8.0
    assert len(steps.calls) < 3 * 5
    assert run.tokens_per_s == 15 / (8.0 * len(steps.calls))


def test_a_second_run_counts_its_own_steps_only() -> None:
    steps = Steps()
    runs = [steps.serve(StreamLoad(1, 10, 4)) for _ in range(2)]
    assert [len(run.steps) for run in runs] == [2, 2]
    cells = row(StreamLoad(1, 10, 4), "engine", runs)
    assert [cells[key].median for key in ("step_ms", "executable_ms", "host_ms")] == [8e3, 5e3, 3e3]  # type: ignore[union-attr]
    assert cells["acceptance_length"] is None


def test_the_websockets_share_of_the_engines_rate_is_that_within_a_round() -> None:
    def run(seconds: float) -> Run:
        return Run((outcome((seconds, 2), ended_s=seconds),))

    rows = rows_of(StreamLoad(1, 1, 2), [run(1.0), run(10.0), run(4.0)], [run(2.0), run(10.0), run(5.0)])
    assert "of_engine" not in rows[0]
    assert rows[1]["of_engine"] == Spread(0.8, 0.5, 1.0, 3)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_stream_that_fails_is_no_figure() -> None:
    steps = Steps(fails=True)
    with pytest.raises(NpucompileError, match="reason='error'"):
        steps.serve(StreamLoad(1, 10, 4))


def test_tokens_that_arrive_together_share_the_time() -> None:
    run = Run((outcome((1.0, 1), (4.0, 3), (6.0, 2), ended_s=10.0), outcome((3.0, 1), (4.0, 1))))
    assert run.tokens_per_s == pytest.approx(0.8)
    assert run.first_ms == 2e3
    assert run.between_ms == 1e3
    at_once = Run((outcome((1.0, 2), ended_s=1.0),))
    assert at_once.between_ms is None
    assert "between_tokens_ms" not in row(StreamLoad(1, 1, 2), "websocket", [at_once])
    assert "step_ms" not in row(StreamLoad(1, 1, 2), "websocket", [run])


def test_prompts_are_legal_equal_in_length_and_the_same_again() -> None:
    load = StreamLoad(16, 20, 4)
    prompts = load.prompts(50)
    assert prompts == load.prompts(50)
    assert {len(prompt) for prompt in prompts} == {20}
    assert all(0 <= token < 50 for prompt in prompts for token in prompt)
    assert len({tuple(prompt) for prompt in prompts}) == 16
    # More streams are the same ones and others, so that loads differ in one thing only.
    assert StreamLoad(4, 20, 9).prompts(50) == prompts[:4]


@pytest.mark.parametrize("load", [StreamLoad(1, 60, 5), StreamLoad(1, 0, 5), StreamLoad(1, 5, 1)])
def test_a_load_beyond_the_context_is_refused(load: StreamLoad) -> None:
    StreamLoad(1, 60, 4).check(64)
    with pytest.raises(SpecError, match=f"{load.prompt_tokens} prompt tokens and {load.tokens} to generate.*context of 64"):
        load.check(64)


def test_both_paths_give_what_generate_gives(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results: dict[str, list[Run]] = {}

    def noted(load: StreamLoad, path: str, runs: list[Run]) -> Any:
        results[path] = runs
        return row(load, path, runs)

    monkeypatch.setattr(bench_streams, "row", noted)
    artifact, load = Artifact.open(tiny_artifact), StreamLoad(3, 6, 8)
    table = streams(artifact, [load], 1, QUIET)
    executor = TimedExecutor(artifact)
    expected = tuple(done.token_ids for done in complete(executor, load.prompts(executor.vocab_size), Sampling(), 8, frozenset()))
    assert [run.token_ids for runs in results.values() for run in runs] == [expected] * 2
    assert all(call.seconds > 0 for call in executor.calls)
    assert [(line["streams"], line["path"]) for line in table.rows] == [(3, "engine"), (3, "websocket")]
    assert "6 prompt tokens and 8 generated" in as_text(table)
    engine, websocket = (line["acceptance_length"] for line in table.rows)
    assert isinstance(engine, float)
    assert 1 <= engine <= 4
    assert websocket is None


def test_a_load_that_does_not_fit_stops_the_server_too(tiny_artifact: Path) -> None:
    with pytest.raises(SpecError, match="context of 64"):
        streams(Artifact.open(tiny_artifact), [StreamLoad(1, 60, 60)], 1, QUIET)
