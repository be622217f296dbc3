"""tools/plan/accuracy.py: the errors of the parameters that are shipped, and what the report says of them."""

from __future__ import annotations

import numpy as np

from npucompile.tools.plan.accuracy import Accuracy, Line, lines_of, model_of, ordered_pairs, roofline_ms
from npucompile.tools.plan.fit import fit
from npucompile.tools.plan.measurements import measured
from npucompile.tools.plan.parameters import NAMES, fitted, priors
from npucompile.tools.plan.published import case_of


def test_shipped_parameters_predict_what_is_published():
    rows = measured()
    predicted = model_of({name: case_of(name) for name in rows})
    errors = {name: predicted(name, fitted()) for name in rows}
    tpot = [abs(errors[name]["tpot_ms"] / row.tpot_ms - 1) for name, row in rows.items()]
    tok_s = [abs(errors[name]["output_tok_s"] / row.output_tok_s - 1) for name, row in rows.items()]
    assert np.median(tpot) <= 0.06
    assert np.median(tok_s) <= 0.04
    rooflines = [roofline_ms(case_of(name)) / row.tpot_ms for name, row in rows.items()]
    assert max(rooflines) < 1
    assert np.median(np.abs(np.array(rooflines) - 1)) > 5 * np.median(tpot)


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
