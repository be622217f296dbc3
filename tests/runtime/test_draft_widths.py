"""Artifacts with decode steps of several widths: tokens are those of one width, and the width follows what becomes of drafts."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
from support import tiny
from support.once import made_once

from npucompile.graphs.errors import SpecError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.engine import Engine
from npucompile.runtime.request import FinishEvent, Request, Sampling, TokenEvent
from npucompile.tools.agreement.executables import verify

WIDTHS = (1, 2, 4)
MS = {1: 10.0, 2: 14.0, 4: 20.0}
TOKENS = 110
# Of the agreeing checkpoint every token follows from the last one alone, so that its draft head is always right.
CHECKPOINTS = {"refused": 0, "agreeing": 50}


@pytest.fixture(scope="module")
def executors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CpuExecutor]:
    def build(home: Path) -> None:
        for name, agreeing in CHECKPOINTS.items():
            model = tiny.write_checkpoint(home / f"{name}-checkpoint", seed=3, agreeing=agreeing)
            sizes = {"buckets": (1, 4), "prefill": (16,), "max_model_len": 256}
            tiny.built(tiny.planned(model, draft_widths=WIDTHS, **sizes), home / name, fresh=True)

    home = made_once(tmp_path_factory, "several-widths", build)
    return {name: CpuExecutor(Artifact.open(home / name)) for name in CHECKPOINTS}


class Served:
    """Requests of one prompt each, served together; by request its tokens, and how many decode steps there were of each width."""

    def __init__(self, executor, *samplings, only=WIDTHS, tokens=TOKENS, run_ahead=0, **wanted):
        engine = Engine(executor, measured=True, run_ahead=run_ahead, refresh_every_s=None)
        self.tokens, self.widths, self.records = [[] for _ in samplings], Counter(), []
        widths, launch = [], executor.launch

        def launched(bucket, inputs):
            widths.append(bucket.q_len if bucket.kind == "decode" else 0)
            return launch(bucket, inputs)

        stepper = engine.stepper
        kept = tuple(bucket for bucket in executor.buckets if bucket.kind != "decode" or bucket.q_len in only)
        stepper.state = dataclasses.replace(stepper.state, policy=dataclasses.replace(stepper.policy, buckets=kept))
        # What steps of these widths take, whatever the machine is busy with.
        ended = iter(widths)
        stepper.took_ms = lambda *_: MS.get(next(ended), 30.0)
        for i, sampling in enumerate(samplings):
            engine.submit(Request(str(i), (5 + i, 9, 40 + i), tokens, sampling, **wanted), self.sink(i))
        with mock.patch.object(executor, "launch", launched):
            while engine.step():
                pass
        self.widths = [width for width in widths if width]

    def sink(self, i):
        def arrived(event):
            if isinstance(event, TokenEvent):
                self.tokens[i] += event.token_ids
            elif isinstance(event, FinishEvent):
                assert event.reason == "length", event
                self.records.append(event.record)

        return arrived


GREEDY, SAMPLED = Sampling(), Sampling(temperature=0.8, top_k=20, seed=11)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_tokens_are_those_of_any_one_width(executors, name):
    executor = executors[name]
    requests = (GREEDY, SAMPLED, Sampling(temperature=1.2, seed=4), GREEDY)
    several = Served(executor, *requests, tokens=60)
    assert set(several.widths) == set(WIDTHS)
    for width in WIDTHS:
        alone = Served(executor, *requests, only=(width,), tokens=60)
        assert set(alone.widths) == {width}
        assert alone.tokens == several.tokens
    assert Served(executor, *requests, tokens=60, run_ahead=executor.run_ahead, speculative_tokens=0).tokens == several.tokens


def test_a_checkpoint_whose_drafts_are_refused_comes_to_steps_without_and_one_whose_agree_to_the_widest(executors):
    for name, width in (("refused", 1), ("agreeing", 4)):
        for rows in (1, 3):
            served = Served(executors[name], *[GREEDY] * rows)
            # Every width is measured first.
            settled = Counter(served.widths[20:])
            assert settled[width] > 0.7 * settled.total(), (name, rows, settled)
        for record in served.records:
            assert (record.acceptance_length > 3.5) == (name == "agreeing")


def test_steps_of_every_width_are_verified(executors):
    """Rows of a narrow step start from any of a request's state slots, and write the first of them."""
    measured = verify(executors["refused"].artifact, tiny.QUIET)
    assert {name for name in measured if name.startswith("decode")} == {f"decode-b{rows}-q{width}" for rows in (1, 4) for width in WIDTHS}


def test_a_build_says_which_widths_are_legal(tiny_checkpoint):
    for widths in ((1, 2), (1, 5)):
        with pytest.raises(SpecError, match=r"a step of this build has up to 4 tokens of a request"):
            tiny.planned(tiny_checkpoint, draft_widths=widths)
    plan = tiny.planned(tiny_checkpoint, draft_widths=WIDTHS)
    assert {bucket.q_len for bucket in plan.buckets if bucket.kind == "decode"} == set(WIDTHS)
    assert ("--draft-widths", "1,2,4") in list(zip(plan.arguments, plan.arguments[1:], strict=False))
    with pytest.raises(SpecError, match="has recurrent states, whose operators of NPUs take one width; legal is 2"):
        tiny.planned_device(tiny_checkpoint, draft_widths=(1, 2))
