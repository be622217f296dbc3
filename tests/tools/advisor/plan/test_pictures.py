"""tools/advisor/plan/pictures.py: one page whose numbers are the predictions'."""

from __future__ import annotations

from pathlib import Path

from plotly import graph_objects

from npucompile.tools.advisor.plan.parameters import fitted
from npucompile.tools.advisor.plan.pictures import figures, pareto, timeline, write
from npucompile.tools.advisor.plan.predict import predict
from npucompile.tools.advisor.plan.published import case_of

NAMES = ("qwen3-32b-a3x4-mix-6k-1.5k-18ms", "qwen3-32b-a2x8-mix-6k-1.5k-18ms")


def drawn():
    return [(name, case_of(name), predict(case_of(name))) for name in NAMES]


def test_pictures_hold_the_predictions():
    shown = drawn()
    first = shown[0][2]
    points = pareto(graph_objects, shown).data
    assert [(p.x[0], p.y[0]) for p in points] == [(p.tpot_ms.mean, p.output_tok_s) for _, _, p in shown]
    every = figures(shown, fitted())
    assert len(every) == 5
    assert sum(bar.x[0] for bar in every[2].data) == sum(first.parts_ms.values())
    time = sum(sum(bar.width) for bar in timeline(graph_objects, "a", first).data)
    assert abs(time - first.trace.makespan_s) < 0.02 * first.trace.makespan_s
    tpot = every[4].data[0]
    assert list(tpot.y) == sorted(tpot.y, reverse=True)


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    write(file, "a < b", drawn()[:1], fitted())
    text = file.read_text("utf-8")
    assert "a &lt; b" in text
    assert 'src="http' not in text
    assert text.count("Plotly.newPlot") == 5
