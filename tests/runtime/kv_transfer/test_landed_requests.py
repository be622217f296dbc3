"""Requests that have landed go on wherever their pages come from the next time."""

from __future__ import annotations

from pathlib import Path

from npucompile.runtime.request import Request
from tests.support.pairs import PROMPT, Pair, alone, check, crowded


def test_a_prompt_of_one_token_needs_no_handover(tiny_artifact: Path) -> None:
    pair = Pair(tiny_artifact)
    pair.ask(Request("short", PROMPT[:1], 6))
    pair.settle()
    *events, end = pair.results["short"]
    assert (end.reason, next(pair.numbers), pair.landed.count) == ("length", 1, 0)
    assert [token for event in events for token in event.token_ids] == alone(tiny_artifact, PROMPT[:1])


def test_they_may_be_handed_over_on_another_connection(tiny_artifact: Path) -> None:
    pair = crowded(tiny_artifact)
    while pair.receivers[0].rooms:
        assert pair.go_on()
    pair.cut()
    check(pair, tiny_artifact)
    assert next(pair.numbers) > 7


def test_without_a_prefill_server_they_are_computed_here(tiny_artifact: Path) -> None:
    pair = crowded(tiny_artifact)
    pair.reachable = False
    check(pair, tiny_artifact)
    assert next(pair.numbers) == 7
    assert pair.landed.computed_here > 0
