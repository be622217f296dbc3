"""One page with what a plan found: Pareto front, memory, causes, the simulated server over time, sensitivity to acceptance."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from ....graphs.errors import SpecError
from ....graphs.steps.decode import DECODE
from ....graphs.steps.prefill import PREFILL
from .parameters import PlanParameters
from .predict import Prediction, predict
from .system import LoadCase

Drawn = Sequence[tuple[str, LoadCase, Prediction]]
"""A label, a case and its prediction; of the first, the timeline is drawn."""

_POINTS = 7
_MOST_SPANS = 4000
COLOURS = {DECODE.name: "#7aa6d8", PREFILL.name: "#e6a070"}


def write(path: Path, title: str, drawn: Drawn, parameters: PlanParameters) -> None:
    """Writes the page: one file that needs nothing else.

    Raises:
        SpecError: plotly is not installed.
    """
    pages = figures(drawn, parameters)
    parts = [figure.to_html(full_html=False, include_plotlyjs=index == 0) for index, figure in enumerate(pages)]
    head = f'<!doctype html><html><head><meta charset="utf-8"><title>{html.escape(title)}</title></head>'
    path.write_text(f"{head}<body><h1>{html.escape(title)}</h1>{''.join(parts)}</body></html>", encoding="utf-8")


def figures(drawn: Drawn, parameters: PlanParameters) -> list[Any]:
    """The pictures, in the order of the page."""
    objects = _plotly()
    shown = [
        pareto(objects, drawn),
        stacked(objects, "Memory of a rank", "GiB", [(label, dict(p.memory)) for label, _, p in drawn]),
        stacked(objects, "Time of a token by cause", "ms", [(label, dict(p.parts_ms)) for label, _, p in drawn]),
    ]
    label, case, prediction = drawn[0]
    if prediction.trace.spans:
        shown.append(timeline(objects, label, prediction))
    if case.decode.drafts:
        shown.append(sensitivity(objects, label, case, parameters))
    return shown


def pareto(objects: ModuleType, drawn: Drawn) -> Any:
    """TPOT against tok/s of an instance, with 80 % intervals."""
    figure = objects.Figure()
    for label, _, prediction in drawn:
        tpot, served = prediction.tpot_ms.mean, prediction.output_tok_s
        (low, high), (less, more) = prediction.interval["tpot_ms"], prediction.interval["output_tok_s"]
        figure.add_scatter(
            name=label,
            x=[tpot],
            y=[served],
            mode="markers",
            marker={"size": 10},
            error_x={"array": [high - tpot], "arrayminus": [tpot - low], "symmetric": False},
            error_y={"array": [more - served], "arrayminus": [served - less], "symmetric": False},
        )
    return _titled(figure, "Time per token against throughput of an instance", "TPOT, ms", "tok/s")


def stacked(objects: ModuleType, title: str, unit: str, bars: Sequence[tuple[str, dict[str, float]]]) -> Any:
    """A bar a candidate, stacked by kind."""
    figure = objects.Figure()
    for kind in dict.fromkeys(kind for _, parts in bars for kind in parts):
        figure.add_bar(name=kind, orientation="h", y=[label for label, _ in bars], x=[max(parts.get(kind, 0.0), 0.0) for _, parts in bars])
    figure.update_layout(barmode="stack", yaxis={"autorange": "reversed"}, height=220 + 36 * len(bars))
    return _titled(figure, title, unit, "")


def timeline(objects: ModuleType, label: str, prediction: Prediction) -> Any:
    """Running requests over time, coloured by the kind of step."""
    spans = prediction.trace.spans[:_MOST_SPANS]
    figure = objects.Figure()
    for kind, colour in COLOURS.items():
        own = [span for span in spans if span.kind == kind]
        figure.add_bar(
            name=kind,
            x=[(span.start_s + span.end_s) / 2 for span in own],
            width=[span.end_s - span.start_s for span in own],
            y=[span.running if kind == DECODE.name else span.rows for span in own],
            marker={"color": colour, "line": {"width": 0}},
            hovertemplate=f"{kind}: %{{y}} at %{{x:.3f}} s<extra></extra>",
        )
    figure.update_layout(barmode="overlay", bargap=0)
    return _titled(figure, f"Simulated server: {label}", "seconds", "requests that decode, prompts of a group that prefill")


def sensitivity(objects: ModuleType, label: str, case: LoadCase, parameters: PlanParameters) -> Any:
    """TPOT and tok/s over tokens a step."""
    most = case.decode.candidates
    steps = [1 + (most - 1) * i / (_POINTS - 1) for i in range(_POINTS)]
    results = [predict(replace(case, accepted=accepted), parameters) for accepted in steps]
    figure = objects.Figure()
    figure.add_scatter(name="TPOT, ms", x=steps, y=[result.tpot_ms.mean for result in results])
    figure.add_scatter(name="tok/s", x=steps, y=[result.output_tok_s for result in results], yaxis="y2")
    figure.update_layout(yaxis2={"overlaying": "y", "side": "right", "title": "tok/s", "rangemode": "tozero"})
    return _titled(figure, f"Sensitivity to acceptance: {label}", "tokens a step", "TPOT, ms")


def _titled(figure: Any, title: str, x: str, y: str) -> Any:
    figure.update_layout(title=title, template="plotly_white", xaxis={"title": x, "rangemode": "tozero"}, yaxis_title=y)
    return figure


def _plotly() -> ModuleType:
    try:
        from plotly import graph_objects
    except ImportError:
        raise SpecError("--html draws with plotly, which is not installed; legal is `pip install npucompile[plots]`") from None
    return graph_objects  # type: ignore[no-any-return]
