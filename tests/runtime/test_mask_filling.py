"""runtime/mask_filling.py: what one request's masks take is not taken from the others, whose tokens are the same."""

from __future__ import annotations

import threading

import msgpack
from support.constrained import PROMPTS, Automaton, asking, run, turns
from support.toy_device import Collector

from npucompile.runtime.engine import Engine
from npucompile.runtime.journal import HELD, Journal
from npucompile.runtime.mask_filling import MaskFilling
from npucompile.runtime.replay import replay

WAIT_S = 60


class Stuck(Automaton):
    """Cannot say what follows its first tokens before it is let go."""

    def __init__(self) -> None:
        super().__init__(turns)
        self.go = threading.Event()

    def fill(self, output, drafts, bitmask):
        assert len(output) < 3 or self.go.wait(WAIT_S)
        super().fill(output, drafts, bitmask)


def test_a_request_whose_mask_is_not_ready_sits_out_and_the_others_end(executors):
    alone = [outcome.tokens for outcome in run(executors[0], [asking(prompt, Automaton(turns)) for prompt in PROMPTS[:2]])]
    (free,) = [outcome.tokens for outcome in run(executors[0], [asking(PROMPTS[2])])]
    stuck, entries = Stuck(), []
    engine, outcomes = Engine(executors[0]), [Collector() for _ in range(3)]
    engine.stepper.journal = Journal(lambda entry: entries.append(msgpack.unpackb(msgpack.packb(entry))))
    for request, outcome in zip(
        [asking(PROMPTS[0], stuck), asking(PROMPTS[1], Automaton(turns)), asking(PROMPTS[2])], outcomes, strict=True
    ):
        engine.submit(request, outcome)
    while outcomes[1].end is None or outcomes[2].end is None:
        assert engine.step()
    assert outcomes[0].end is None
    stuck.go.set()
    while engine.step():
        pass
    engine.stepper.check()
    assert [outcome.tokens for outcome in outcomes] == [*alone, free]
    # The record says who sat out, so that it repeats.
    assert any(entry[0] == HELD for entry in entries)
    assert replay(Engine(executors[0]), entries).divergence is None


def test_a_request_is_cancelled_while_its_mask_is_filled(executors):
    stuck, outcome = Stuck(), Collector()
    engine = Engine(executors[0])
    engine.submit(asking(PROMPTS[0], stuck, "a"), outcome)
    while len(outcome.tokens) < 3:
        engine.step()
    engine.cancel("a")
    while engine.step():
        pass
    stuck.go.set()
    assert outcome.end.reason == "cancelled"
    engine.stepper.check()


def test_what_exceeds_its_share_ends_alone(executors):
    """By a clock on which each mask of one request takes half a second."""
    spent = threading.local()

    class Slow(Automaton):
        def fill(self, output, drafts, bitmask):
            spent.s = getattr(spent, "s", 0.0) + 0.5
            super().fill(output, drafts, bitmask)

    engine, outcomes = Engine(executors[0]), [Collector(), Collector()]
    engine.stepper.masks = MaskFilling(executors[0].limits.bitmask_words, lambda: getattr(spent, "s", 0.0))
    for request, outcome in zip([asking(PROMPTS[0], Slow(turns)), asking(PROMPTS[1], Automaton(turns))], outcomes, strict=True):
        engine.submit(request, outcome)
    while engine.step():
        pass
    assert (outcomes[0].end.reason, outcomes[0].end.code) == ("error", "grammar_too_complex")
    assert "its masks take more than 1 s of a processor" in outcomes[0].end.message
    assert 0 < len(outcomes[0].tokens) < 16
    assert outcomes[1].end.reason in ("length", "stop")
