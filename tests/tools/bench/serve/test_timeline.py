"""tools/bench/serve/timeline.py: the parts of a request's life cover it without a gap, and the page needs nothing but itself."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs.errors import SpecError
from npucompile.tools.bench.serve import timeline
from npucompile.tools.bench.serve.outcome import Arrival, Outcome, Told
from npucompile.tools.bench.serve.timeline import Span, spans

LIFE = Outcome(3, 0.0, 1.0, 4.0, 5, (Arrival(2.0, 1), Arrival(3.5, 2)), Told(queue_ms=250.0))


def test_a_life_has_its_parts() -> None:
    assert spans(LIFE) == [
        Span(3, "held back", 0.0, 1.0),
        Span(3, "queue", 1.0, 0.25),
        Span(3, "prefill", 1.25, 0.75),
        Span(3, "tokens", 2.0, 2.0),
    ]
    assert [span.kind for span in spans(Outcome(0, 0.0, 0.0, 1.0, 5, (Arrival(0.5, 1),)))] == ["queue and prefill", "tokens"]
    assert spans(Outcome(0, 0.0, 0.0, 1.0, 5, error="no")) == [Span(0, "failed", 0.0, 1.0)]


@given(st.lists(st.floats(0, 10), min_size=4, max_size=8), st.none() | st.floats(0, 2e4), st.booleans())
def test_no_moment_is_missing_or_twice(moments: list[float], queue_ms: float | None, fails: bool) -> None:
    due, sent, *arrivals, end = sorted(moments)
    outcome = Outcome(0, due, sent, end, 1, tuple(Arrival(s, 1) for s in arrivals), Told(queue_ms=queue_ms), "no" if fails else None)
    at = due
    for span in spans(outcome):
        assert span.seconds >= 0
        assert span.start_s == pytest.approx(at)
        at = span.start_s + span.seconds
    assert at == pytest.approx(end)


class Sources(HTMLParser):
    """Collects what a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    timeline.check(path)
    timeline.write([LIFE], "one <request>", path)
    text = path.read_text(encoding="utf-8")
    sources = Sources()
    sources.feed(text)
    assert sources.found == []
    assert re.search(r"Plotly\.newPlot\(", text)


def test_bars_and_ticks_are_those_of_the_outcomes() -> None:
    figure = timeline.figure([LIFE, Outcome(4, 0.0, 0.0, 1.0, 5, error="no")], "two")
    traces = {trace.name: trace for trace in figure.data}
    assert set(traces) == {"held back", "queue", "prefill", "tokens", "failed", "arrival of tokens"}
    assert (traces["prefill"].base, traces["prefill"].x, traces["prefill"].y) == ((1.25,), (0.75,), (3,))
    ticks = traces["arrival of tokens"]
    assert (list(ticks.x), list(ticks.y), list(ticks.customdata)) == ([2.0, 3.5], [3, 3], [1, 2])


def test_a_page_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="is no directory; legal is a file in one that exists"):
        timeline.check(tmp_path / "absent" / "page.html")
