"""tools/bench/serve/drive.py: requests leave when they are due, never more than allowed, and one that fails stops no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from npucompile.graphs.errors import NpucompileError, RequestError
from npucompile.tools.bench.serve.drive import drive
from npucompile.tools.bench.serve.outcome import ServerWord, StreamOutcome
from npucompile.tools.bench.serve.websocket import Arrived
from npucompile.tools.bench.serve.workload import WorkloadPrompt

STEP_S = 0.02


class Paced:
    """Answers with a token every STEP_S; prompts that begin with 0 fail after their first token."""

    def __init__(self) -> None:
        self.live = self.most = 0

    async def send(self, prompt: WorkloadPrompt, arrived: Arrived) -> ServerWord:
        self.live += 1
        self.most = max(self.most, self.live)
        try:
            for _ in range(prompt.output_tokens):
                await asyncio.sleep(STEP_S)
                arrived([1])
                if prompt.token_ids[0] == 0:
                    raise RequestError("it broke")
        finally:
            self.live -= 1
        return ServerWord(prompt_tokens=9)


def run(
    prompts: list[WorkloadPrompt], arrivals: list[float], limit: int | None = None
) -> tuple[Paced, tuple[StreamOutcome, ...], list[int]]:
    backend, ended = Paced(), list[int]()
    on_end: Callable[[StreamOutcome], None] = lambda outcome: ended.append(outcome.index)  # noqa: E731
    outcomes = asyncio.run(drive(backend, prompts, arrivals, max_concurrency=limit, on_end=on_end))
    return backend, outcomes, ended


def test_each_request_leaves_when_it_is_due() -> None:
    _, outcomes, _ = run([WorkloadPrompt((1, 2), 2)] * 4, [0.0, 0.0, 0.05, 0.1])
    assert [outcome.due_s for outcome in outcomes] == [0.0, 0.0, 0.05, 0.1]
    for outcome in outcomes:
        assert outcome.due_s <= outcome.sent_s < outcome.arrivals[0].s < outcome.arrivals[1].s <= outcome.ended_s
        assert (outcome.prompt_tokens, outcome.output_tokens, outcome.planned_tokens) == (9, 2, 2)


@pytest.mark.parametrize("limit", [1, 3])
def test_never_more_are_open_than_allowed(limit: int) -> None:
    backend, outcomes, ended = run([WorkloadPrompt((1,), 2)] * 7, [0.0] * 7, limit)
    assert backend.most == limit
    assert sorted(ended) == list(range(7)) == [outcome.index for outcome in outcomes]
    # What waits is not yet sent: its latency does not count the wait.
    assert all((outcome.ttft_s or 9) < 2 * limit * STEP_S + 0.5 for outcome in outcomes)
    assert outcomes[-1].sent_s > STEP_S


def test_a_failure_is_recorded_beside_what_came_before_it() -> None:
    _, outcomes, _ = run([WorkloadPrompt((1,), 2), WorkloadPrompt((0,), 2), WorkloadPrompt((1,), 2)], [0.0] * 3)
    assert [outcome.error for outcome in outcomes] == [None, "it broke", None]
    assert [outcome.output_tokens for outcome in outcomes] == [2, 1, 2]


def test_a_defect_of_the_load_itself_is_not_a_failed_request() -> None:
    class Broken(Paced):
        async def send(self, prompt: WorkloadPrompt, arrived: Arrived) -> ServerWord:
            raise ZeroDivisionError

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(drive(Broken(), [WorkloadPrompt((1,), 1)], [0.0]))
    assert not caught.group_contains(NpucompileError)
