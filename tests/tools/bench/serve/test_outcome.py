"""tools/bench/serve/outcome.py: latencies of one request, from times written by hand."""

from __future__ import annotations

import pytest

from npucompile.tools.bench.serve.outcome import Arrival, ServerWord, StreamOutcome


def test_latencies_count_from_sending() -> None:
    arrivals = (Arrival(1.5, 1), Arrival(1.7, 2), Arrival(2.0, 1))
    outcome = StreamOutcome(0, 0.25, 1.0, 2.5, 7, arrivals)
    assert outcome.ttft_s == 0.5
    assert outcome.e2e_s == 1.0
    assert outcome.tpot_s == pytest.approx(0.5 / 3)
    # The two that came together share the 0.2 s before them.
    assert outcome.itl_s == pytest.approx([0.1, 0.1, 0.3])
    assert (outcome.prompt_tokens, outcome.output_tokens) == (7, 4)


def test_the_servers_counts_win() -> None:
    outcome = StreamOutcome(0, 0.0, 0.0, 3.0, 7, (Arrival(1.0, 1), Arrival(2.0, 1)), ServerWord(prompt_tokens=9, output_tokens=5))
    assert (outcome.prompt_tokens, outcome.output_tokens) == (9, 5)
    assert outcome.tpot_s == 0.25


def test_what_did_not_happen_has_no_latency() -> None:
    one, none = StreamOutcome(0, 0.0, 1.0, 3.0, 7, (Arrival(2.0, 1),)), StreamOutcome(0, 0.0, 1.0, 3.0, 7)
    assert (one.ttft_s, one.tpot_s, one.itl_s, one.e2e_s) == (1.0, None, [], 1.0)
    assert (none.ttft_s, none.tpot_s, none.itl_s, none.e2e_s) == (None, None, [], 2.0)
