"""runtime/constraint.py: constrained output is what transformers generates under the same constraint, whatever is drafted or preempted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgpack
import numpy as np
import pytest
import torch
from support import tiny
from transformers import AutoModelForCausalLM

from npucompile.graphs.errors import RequestError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.constraint import Bitmask
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.engine import Engine
from npucompile.runtime.journal import Journal
from npucompile.runtime.replay import replay
from npucompile.runtime.request import Event, FinishEvent, Request, Sampling, TokenEvent
from npucompile.tools.notation import PrefillSize

PROMPTS = [b"In the beginning", b"a", b"And it came to pass", b"the", b"zz"]
TOKENS, BITMASKS = 16, 2


class Automaton:
    """A constraint by a function of the output: after each one, the tokens that may follow."""

    def __init__(self, legal: Callable[[Sequence[int]], Sequence[int]]) -> None:
        self.legal = legal
        self.asked: list[tuple[int, ...]] = []

    def fill(self, output: Sequence[int], drafts: Sequence[int], bitmask: Bitmask) -> None:
        self.asked.append(tuple(output))
        for place in range(len(drafts) + 1):
            bits = np.zeros(bitmask.shape[1] * 32, bool)
            bits[list(self.legal([*output, *drafts[:place]]))] = True
            bitmask[place] = np.packbits(bits, bitorder="little").view(np.int32)


def turns(output: Sequence[int]) -> list[int]:
    """Three letters, then two digits, and so on: what may follow depends on where the output stands."""
    return [*range(ord("a"), ord("z") + 1)] if len(output) % 5 < 3 else [*range(ord("0"), ord("9") + 1)]


def rising(output: Sequence[int]) -> list[int]:
    """Never a smaller byte than the last; the largest, or the end."""
    return [*range(output[-1] if output else 40, 256), tiny.EOS]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.write_checkpoint(tmp_path_factory.mktemp("model") / "model", seed=7, agreeing=True)


@pytest.fixture(scope="module")
def executors(model, tmp_path_factory):
    """One of graphs that draft, one of graphs that do not, and one of graphs without bitmasks."""
    home, opened = tmp_path_factory.mktemp("built"), []
    for name, drafts, bitmasks in (("drafts", 3, BITMASKS), ("plain", 0, BITMASKS), ("free", 0, 0)):
        sizes = {"buckets": (1, 4), "prefill": (32, PrefillSize(32, 4)), "num_speculative_tokens": drafts, "structured_outputs": bitmasks}
        tiny.built(tiny.planned(model, **sizes), home / name, fresh=True)
        opened.append(CpuExecutor(Artifact.open(home / name)))
    return opened


@pytest.fixture(scope="module")
def theirs(model):
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


@torch.no_grad()
def expected(theirs, prompt: bytes, legal: Callable[[Sequence[int]], Sequence[int]]) -> list[int]:
    """Greedy tokens of transformers, the end-of-sequence token left out."""
    ids = torch.tensor([list(prompt)])
    options = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": tiny.EOS, "pad_token_id": 0}
    found = theirs.generate(ids, prefix_allowed_tokens_fn=lambda _, seen: list(legal(seen[len(prompt) :].tolist())), **options)
    tokens = found[0, len(prompt) :].tolist()
    return tokens[: tokens.index(tiny.EOS)] if tiny.EOS in tokens else tokens


class Outcome:
    """Sink of one request."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.end: FinishEvent | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, TokenEvent):
            self.tokens += event.token_ids
        else:
            self.end = event


def run(executor, requests: Sequence[Request], run_ahead: int | None = None) -> list[Outcome]:
    engine, outcomes = Engine(executor, run_ahead=run_ahead), [Outcome() for _ in requests]
    for request, outcome in zip(requests, outcomes, strict=True):
        engine.submit(request, outcome)
    while engine.step():
        pass
    engine.check()
    return outcomes


def asking(prompt: bytes, constraint: object, name: str = "", **options) -> Request:
    return Request(name or prompt.decode(), tuple(prompt), TOKENS, stop_token_ids=frozenset([tiny.EOS]), constraint=constraint, **options)


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
    engine.journal = Journal(lambda entry: entries.append(msgpack.unpackb(msgpack.packb(entry))))
    dead = Automaton(lambda output: [] if len(output) >= 4 else turns(output))
    sampling = Sampling(temperature=1.5, seed=3)
    for name, constraint in (("a", Automaton(turns)), ("dead", dead), ("free", None), ("b", Automaton(rising))):
        engine.submit(asking(PROMPTS[0], constraint, name, sampling=sampling), Outcome())
    while engine.step():
        pass
    found = replay(Engine(executors[0]), entries)
    assert (found.divergence, found.requests) == (None, 4)
    assert ["dead end", "dead"] in entries
    # Without the bitmasks another run comes of it.
    assert replay(Engine(executors[0]), [entry for entry in entries if entry[0] != "masks"]).divergence is not None


def test_graphs_without_bitmasks_refuse_constraints(executors):
    with pytest.raises(RequestError, match="take no bitmasks; legal is a build with --structured-outputs"):
        Engine(executors[2]).submit(asking(PROMPTS[0], Automaton(turns)), Outcome())
