"""tools/bench/serve/summary.py: figures of a load written by hand, and percentiles beside numpy's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs.errors import SpecError
from npucompile.tools.bench.serve.outcome import Arrival, ServerWord, StreamOutcome
from npucompile.tools.bench.serve.summary import latency, meets, read_objectives, summarise

TOLD = (ServerWord(cached_tokens=4, verify_steps=2, accepted_tokens=1), ServerWord(cached_tokens=0, verify_steps=2, accepted_tokens=2))
LOAD = (
    StreamOutcome(0, 0.0, 0.0, 1.1, 10, (Arrival(0.5, 1), Arrival(0.7, 2), Arrival(1.0, 1)), TOLD[0]),
    StreamOutcome(1, 0.0, 1.0, 1.25, 20, (Arrival(1.25, 1),), TOLD[1]),
    StreamOutcome(2, 0.0, 1.25, 2.0, 40, (Arrival(1.5, 1),), error="it broke"),
)


def test_the_figures_of_a_load() -> None:
    summary = summarise(LOAD, {"ttft": 300.0})
    assert (summary.completed, summary.failed, summary.errors) == (2, 1, {"it broke": 1})
    assert summary.duration_s == 2.0
    assert (summary.total_input, summary.total_output) == (30, 5)
    assert (summary.request_throughput, summary.output_throughput, summary.total_throughput) == (1.0, 2.5, 17.5)
    # 1.0 s and 0.25 s of requests over 2 s; the first is open until 1.1 s, beside the second.
    assert (summary.concurrency, summary.peak_concurrency) == (0.625, 2)
    # In the first second 3 tokens; at 1.0 and 1.25 s two more.
    assert summary.peak_output_throughput == 3.0
    assert (summary.ttft.mean, summary.ttft.median, summary.ttft.count) == (375.0, 375.0, 2)
    assert summary.ttft.percentiles == {95: pytest.approx(487.5), 99: pytest.approx(497.5)}
    assert summary.tpot.mean == pytest.approx(500 / 3)
    assert (summary.itl.count, summary.itl.median) == (3, pytest.approx(100))
    assert summary.e2el.mean == 625.0
    assert summary.goodput == 0.5
    assert (summary.accept_length, summary.cached_tokens) == (1.75, 4)


def test_nothing_told_is_nothing_claimed() -> None:
    summary = summarise([StreamOutcome(0, 0.0, 0.0, 1.0, 1, (Arrival(1.0, 1),))])
    assert (summary.accept_length, summary.cached_tokens, summary.goodput) == (None, None, None)
    assert summary.tpot.count == 0
    assert summarise([]).request_throughput == 0.0


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60))
def test_statistics_are_numpys(seconds: list[float]) -> None:
    found, ms = latency(seconds), 1e3 * np.array(seconds)
    close = {"rel": 1e-9, "abs": 1e-6}
    assert found.count == len(seconds)
    assert found.mean == pytest.approx(float(np.mean(ms)), **close)
    assert found.median == pytest.approx(float(np.median(ms)), **close)
    assert found.std == pytest.approx(float(np.std(ms)), rel=1e-6, abs=1e-3)
    for percent in (95, 99):
        assert found.percentiles[percent] == pytest.approx(float(np.percentile(ms, percent)), **close)


def times(draw_from: list[tuple[float, float]]) -> list[StreamOutcome]:
    return [StreamOutcome(i, 0.0, sent, sent + length, 1) for i, (sent, length) in enumerate(draw_from)]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), max_size=30))
def test_peak_concurrency_is_the_most_at_any_moment(lives: list[tuple[int, int]]) -> None:
    # Lives begin and end at whole seconds, so that half seconds see all there is.
    most = max((sum(sent < moment + 0.5 < sent + length for sent, length in lives) for moment in range(30)), default=0)
    assert summarise(times([(float(a), float(b)) for a, b in lives])).peak_concurrency == most


def test_an_objective_bounds_each_request() -> None:
    fast = LOAD[1]
    assert meets(fast, {"ttft": 250.0, "tpot": 0.1, "e2el": 250.0})
    assert not meets(fast, {"ttft": 249.0})
    assert not meets(LOAD[0], {"tpot": 166.0})


def test_objectives_are_read() -> None:
    assert read_objectives("ttft:200, tpot:50.5") == {"ttft": 200.0, "tpot": 50.5}


@pytest.mark.parametrize("text", ["", "ttft", "ttft:0", "ttft:-1", "ttft:nan", "ttft:inf", "itl:5", "ttft:1,ttft:2", "ttft:1,"])
def test_other_objectives_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match="legal is a list like ttft:200,tpot:50 of ttft, tpot, e2el"):
        read_objectives(text)
