"""tools/lab/accuracy.py: the errors of the parameters that are shipped, and what the report says of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from npucompile.tools.advisor.plan.measurements import loads, measured
from npucompile.tools.advisor.plan.parameters import NAMES, fitted, priors
from npucompile.tools.advisor.plan.published import case_of
from npucompile.tools.builder.deployments import deployment
from npucompile.tools.lab import accuracy as module
from npucompile.tools.lab.accuracy import FOLDS, Accuracy, Line, accuracy, lines_of, model_of, ordered_pairs, roofline_ms
from npucompile.tools.lab.fit import Fit, fit


def test_shipped_parameters_predict_what_is_published():
    rows = measured()
    predicted = model_of({name: case_of(name) for name in rows})
    errors = {name: predicted(name, fitted()) for name in rows}
    tpot = [abs(errors[name]["tpot_ms"] / row.tpot_ms - 1) for name, row in rows.items() if row.tpot_ms]
    tok_s = [abs(errors[name]["output_tok_s"] / row.output_tok_s - 1) for name, row in rows.items() if name not in loads()]
    assert np.median(tpot) <= 0.06
    assert np.median(tok_s) <= 0.04
    floors = [errors[name]["output_tok_s"] / load.measured.output_tok_s - 1 for name, load in loads().items() if load.measured.output_tok_s]
    assert np.median(np.abs(floors)) <= 0.12
    assert abs(np.mean(floors)) <= 0.08
    rooflines = [roofline_ms(case_of(name)) / row.tpot_ms for name, row in rows.items() if row.tpot_ms]
    assert max(rooflines) < 1
    assert np.median(np.abs(np.array(rooflines) - 1)) > 5 * np.median(tpot)


def test_shipped_parameters_have_a3_and_a2_in_their_published_order():
    rows, zero = measured(), (0.0, 0.0)
    predicted = model_of({name: case_of(name) for name in rows})
    lines = []
    for name, row in rows.items():
        if name in loads():
            continue
        figures = predicted(name, fitted())
        errors = figures["tpot_ms"] / row.tpot_ms - 1, figures["output_tok_s"] / row.output_tok_s - 1
        lines.append(Line(name, deployment(name).model, errors, zero, errors, zero, 0.0, True, ""))
    assert ordered_pairs([line for line in lines if line.model == "qwen3-32b"], rows) == (4, 4)
    assert ordered_pairs(lines, rows) == (11, 11)


def test_the_report_has_every_row_and_parameter():
    rows = measured()
    zero = (0.0, 0.0)
    lines = [Line(name, "m", zero, zero, zero, zero, -0.5, True, "") for name in rows]
    whole = fit(lambda name, parameters: {}, {}, priors(), fitted(), iterations=0)
    text = "\n".join(lines_of(Accuracy(lines, whole, {name: (1.0, 2.0) for name in NAMES}, ordered_pairs(lines, rows))))
    assert all(name in text for name in (*rows, *NAMES))
    # Perfect predictions have every order right.
    right, every = ordered_pairs(lines, rows)
    assert right == every > 5


def test_no_fit_begins_where_one_ended_that_saw_what_it_leaves_out(monkeypatch):
    every, seen = set(measured()), {priors(): set[str]()}

    def recorded(model, rows, prior, start):
        assert prior == priors()
        left_out = every - set(rows)
        assert left_out
        assert not left_out & seen[start]
        # Parameters of their own for each fit, so that a start says which it was.
        ended = replace(fitted(), host_ms=1.0 + len(seen) / 1000)
        seen[ended] = set(rows)
        return Fit(ended, {}, {}, 0.0)

    monkeypatch.setattr(module, "fit", recorded)
    result = accuracy(Fit(fitted(), dict.fromkeys(NAMES, 0.1), {}, 0.0))
    assert {line.name for line in result.lines} == every
    assert len(seen) == 1 + len({case_of(name).decode.shape.name for name in every}) + FOLDS
