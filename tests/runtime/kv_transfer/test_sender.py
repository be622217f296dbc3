"""A pair over the tiny hybrid: rooms, engines and writes that fail, in every order: nothing is held, lost or twice."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from npucompile.runtime.request import FinishEvent, Request, Sampling
from tests.support.pairs import PROMPT, Pair, alone

ALONE: dict[tuple[int, ...], list[int]] = {}
MOVES = st.sampled_from(["ask", "ask", "ask", "go on", "go on", "leave", "cut", "wait", "fail a write", "flush"])


@settings(deadline=None)
@given(moves=st.lists(st.tuples(MOVES, st.integers(0, 60)), min_size=1, max_size=14))
def test_every_request_ends_once_and_right(tiny_artifact: Path, moves: list[tuple[str, int]]) -> None:
    pair = Pair(tiny_artifact)
    prompts: dict[str, tuple[int, ...]] = {}
    most: dict[str, int] = {}
    for move, number in moves:
        if move == "ask":
            name = f"r{len(prompts)}"
            prompts[name], most[name] = PROMPT[: 2 + number % 38], number % 7
            pair.ask(Request(name, prompts[name], most[name], Sampling(seed=1)))
        elif move == "go on":
            for _ in range(number):
                pair.go_on()
        elif move == "leave" and pair.results:
            pair.leave(number)
        elif move == "cut":
            pair.cut()
        elif move == "wait":
            pair.wait()
        elif move == "fail a write" and pair.writes.waiting:
            pair.writes.waiting.popleft()(True)
        elif move == "flush":
            (pair.p, pair.d)[number % 2].flush_prefix_cache()
    pair.settle()
    for name, events in pair.results.items():
        *tokens, end = events
        if isinstance(end, str):
            # Nothing was told to the client but why.
            assert end
            assert not tokens
            continue
        assert isinstance(end, FinishEvent)
        assert end.reason in ("length", "cancelled")
        generated = [token for event in tokens for token in event.token_ids]
        if prompts[name] not in ALONE:
            ALONE[prompts[name]] = alone(tiny_artifact, prompts[name])
        expected = ALONE[prompts[name]][: most[name]]
        assert generated == (expected if end.reason == "length" else expected[: len(generated)])
    for engine in (pair.p, pair.d):
        engine.stepper.check()
        assert engine.stats()["num_requests_running"] == engine.stats()["num_requests_waiting"] == 0
        assert engine.stepper.cache_managers[0].pages.owners() <= {next(iter(engine.stepper.cache_managers[0].pages.owners()), None)}
