"""Requests of a decode server whose handover does not go through at once; `test_sender.py` has all orders of events."""

from __future__ import annotations

from pathlib import Path

from npucompile.runtime.request import Request, Sampling
from tests.support.pairs import PROMPT, Pair, alone


def test_requests_that_lose_their_pages_are_asked_for_again(tiny_artifact: Path) -> None:
    pair = Pair(tiny_artifact)
    for number in range(6):
        pair.ask(Request(f"r{number}", PROMPT[number : number + 17], 40, Sampling(seed=1), skip_reading_prefix_cache=True))
    # Two pages each, of ten, and one kept for each that runs; then they grow to four.
    while len(pair.writes.waiting) < 3:
        assert pair.go_on()
    while pair.writes.waiting:
        pair.writes.waiting.popleft()(False)
    pair.settle()
    ends = [events[-1] for events in pair.results.values()]
    assert {end.reason for end in ends} == {"length"}
    assert sum(end.record.preemptions for end in ends) > 0
    assert next(pair.numbers) > 7
    for number in range(6):
        tokens = [token for event in pair.results[f"r{number}"][:-1] for token in event.token_ids]
        assert tokens == alone(tiny_artifact, PROMPT[number : number + 17], 40)
