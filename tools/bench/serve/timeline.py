"""A page with all requests of a load over time: waiting, queue, prefill, tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from ....graphs.errors import SpecError
from .outcome import Outcome

COLOURS = {
    "held back": "#d9d9d9",
    "queue": "#f2b8a0",
    "prefill": "#a9c7ee",
    "queue and prefill": "#a9c7ee",
    "tokens": "#b5ddb0",
    "failed": "#d62728",
}
ROW_PIXELS, MOST_PIXELS = 14, 4000


class Span(NamedTuple):
    """One part of a request's life, in seconds since the start of the load."""

    request: int
    kind: str
    start_s: float
    seconds: float


def spans(outcome: Outcome) -> list[Span]:
    """The parts of a request's life, in order.

    Held back is the time in which the load's own limit kept it from being sent. Where the server tells how long it queued, the queue
    begins with sending and prefill is the rest up to the first token; else the two are one.
    """
    index, sent = outcome.index, outcome.sent_s
    found = [Span(index, "held back", outcome.due_s, sent - outcome.due_s)] if sent > outcome.due_s else []
    if outcome.error is not None:
        return [*found, Span(index, "failed", sent, outcome.ended_s - sent)]
    first = outcome.arrivals[0].s if outcome.arrivals else outcome.ended_s
    if outcome.told.queue_ms is None:
        found.append(Span(index, "queue and prefill", sent, first - sent))
    else:
        started = min(sent + outcome.told.queue_ms / 1e3, first)
        found += [Span(index, "queue", sent, started - sent), Span(index, "prefill", started, first - started)]
    return [*found, Span(index, "tokens", first, outcome.ended_s - first)]


def check(path: Path) -> None:
    """Refuses a page that cannot be written, before the load.

    Raises:
        SpecError: its directory does not exist, or plotly is not installed.
    """
    if not path.parent.is_dir():
        raise SpecError(f"--timeline {path}: {path.parent} is no directory; legal is a file in one that exists")
    _plotly()


def figure(outcomes: Sequence[Outcome], title: str) -> Any:
    """The picture as a plotly figure: a row a request, a bar a part of its life, a tick an arrival of tokens."""
    objects = _plotly()
    picture = objects.Figure()
    for kind, colour in COLOURS.items():
        own = [span for outcome in outcomes for span in spans(outcome) if span.kind == kind]
        if own:
            picture.add_bar(
                name=kind,
                orientation="h",
                base=[span.start_s for span in own],
                x=[span.seconds for span in own],
                y=[span.request for span in own],
                marker={"color": colour},
                hovertemplate=f"request %{{y}}, {kind}: %{{x:.4f}} s from %{{base:.4f}} s<extra></extra>",
            )
    ticks = [(arrival.s, outcome.index, arrival.tokens) for outcome in outcomes for arrival in outcome.arrivals]
    picture.add_scattergl(
        name="arrival of tokens",
        mode="markers",
        x=[s for s, _, _ in ticks],
        y=[index for _, index, _ in ticks],
        customdata=[tokens for _, _, tokens in ticks],
        marker={"symbol": "line-ns", "size": 6, "line": {"width": 1, "color": "#2f5688"}},
        hovertemplate="request %{y}: %{customdata} tokens at %{x:.4f} s<extra></extra>",
    )
    picture.update_layout(
        title=title,
        barmode="overlay",
        bargap=0.3,
        template="plotly_white",
        height=min(240 + ROW_PIXELS * len(outcomes), MOST_PIXELS),
        xaxis={"title": "seconds since the start", "rangemode": "tozero"},
        yaxis={"title": "request", "autorange": "reversed"},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"},
    )
    return picture


def write(outcomes: Sequence[Outcome], title: str, path: Path) -> None:
    """Writes the page: one file that needs nothing else."""
    figure(outcomes, title).write_html(path, include_plotlyjs=True, full_html=True)


def _plotly() -> ModuleType:
    try:
        from plotly import graph_objects
    except ImportError:
        raise SpecError("--timeline draws with plotly, which is not installed; legal is `pip install npucompile[plots]`") from None
    return graph_objects  # type: ignore[no-any-return]
