"""runtime/constraint.py: constrained output is what transformers generates under the same constraint, whatever is drafted or preempted."""

from __future__ import annotations

from collections.abc import Sequence

import msgpack
import pytest
from support.constrained import PROMPTS, Automaton, asking, expected, rising, run, turns
from support.toy_device import Collector

from npucompile.graphs.errors import RequestError
from npucompile.runtime.engine import Engine
from npucompile.runtime.journal import Journal
from npucompile.runtime.replay import replay
from npucompile.runtime.request import Sampling


@pytest.mark.parametrize("legal", [turns, rising])
def test_greedy_output_is_that_of_transformers(theirs, executors, legal):
    """More constrained requests at once than a step has bitmasks, beside free ones; with drafts and without."""
    want = [expected(theirs, prompt, legal) for prompt in PROMPTS]
    free = [asking(prompt, None, f"free {i}") for i, prompt in enumerate(PROMPTS)]
    alone = [outcome.tokens for outcome in run(executors[1], free)]
    assert all(tokens not in want for tokens in alone)
    for executor in executors[:2]:
        mixed = [asking(prompt, Automaton(legal)) for prompt in PROMPTS]
        outcomes = run(executor, [request for pair in zip(mixed, free, strict=True) for request in pair])
        assert [outcome.tokens for outcome in outcomes[::2]] == want
        assert [outcome.tokens for outcome in outcomes[1::2]] == alone
    accepted = [outcome.end.record.accepted_per_position for outcome in run(executors[0], [asking(p, Automaton(legal)) for p in PROMPTS])]
    assert sum(map(sum, accepted)) > 0


def test_sampled_output_is_legal_and_the_same_with_drafts(executors):
    sampling = Sampling(temperature=1.5, top_p=0.95, seed=3)
    both = [[o.tokens for o in run(e, [asking(p, Automaton(turns), sampling=sampling) for p in PROMPTS])] for e in executors[:2]]
    assert both[0] == both[1]
    for tokens in both[0]:
        assert all(token in turns(tokens[:i]) for i, token in enumerate(tokens))


def test_a_constraint_sees_each_output_once_and_in_order(executors):
    constraint = Automaton(turns)
    (outcome,) = run(executors[0], [asking(PROMPTS[0], constraint)])
    assert constraint.asked[0] == ()
    assert constraint.asked == sorted(set(constraint.asked), key=len)
    assert all(tuple(outcome.tokens[: len(seen)]) == seen for seen in constraint.asked)


@pytest.mark.parametrize("dead", [lambda output: [] if len(output) >= 4 else turns(output), None])
def test_a_dead_end_ends_its_request_alone(executors, dead):
    """Whether no token is left or the constraint itself gives up, at its first token or later."""

    def gives_up(output: Sequence[int]) -> list[int]:
        raise ValueError("the grammar is too deep")

    outcomes = run(executors[0], [asking(PROMPTS[0], Automaton(dead or gives_up)), asking(PROMPTS[1], Automaton(turns))])
    assert outcomes[0].end.reason == "error"
    assert ("it allows no token" if dead else "the grammar is too deep") in outcomes[0].end.message
    assert len(outcomes[0].tokens) == (4 if dead else 0)
    assert outcomes[1].end.reason in ("length", "stop")


def test_a_recorded_run_repeats_without_the_constraints_themselves(executors):
    """The journal has their bitmasks, and where one ended its request."""
    entries = []
    engine = Engine(executors[0])
    engine.stepper.journal = Journal(lambda entry: entries.append(msgpack.unpackb(msgpack.packb(entry))))
    dead = Automaton(lambda output: [] if len(output) >= 4 else turns(output))
    sampling = Sampling(temperature=1.5, seed=3)
    for name, constraint in (("a", Automaton(turns)), ("dead", dead), ("free", None), ("b", Automaton(rising))):
        engine.submit(asking(PROMPTS[0], constraint, name, sampling=sampling), Collector())
    while engine.step():
        pass
    found = replay(Engine(executors[0]), entries)
    assert (found.divergence, found.requests) == (None, 4)
    assert ["dead end", "dead"] in entries
    # Without the bitmasks another run comes of it.
    assert replay(Engine(executors[0]), [entry for entry in entries if entry[0] != "masks"]).divergence is not None


def test_graphs_without_bitmasks_refuse_constraints(executors):
    with pytest.raises(RequestError, match="take no bitmasks; legal is a build with --structured-outputs"):
        Engine(executors[2]).submit(asking(PROMPTS[0], Automaton(turns)), Collector())
