"""tools/advisor/plan/parameters.py: nineteen parameters, each with its prior, value and evidence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from npucompile.graphs.errors import SpecError
from npucompile.tools.advisor.plan.parameters import FILE, NAMES, as_logs, entries, fitted, of_logs, priors


def test_there_are_at_most_nineteen_and_none_is_far_from_its_prior():
    assert len(NAMES) <= 19
    for name in NAMES:
        ratio = getattr(fitted(), name) / getattr(priors(), name)
        assert 0.5 <= ratio <= 2 or entries()[name].get("why"), f"{name} is {ratio:.2f} times its prior and says not why"
        assert {"unit", "what", "evidence"} <= set(entries()[name])


def test_logarithms_come_back():
    assert of_logs(as_logs(fitted())) == pytest.approx(fitted()) or vars(of_logs(as_logs(fitted()))) == pytest.approx(vars(fitted()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.pop("memory"), "legal are exactly"),
        (lambda table: table["memory"].update(value=0), "value of memory is 0; legal is a positive number"),
        (lambda table: table["link"].update(sigma="wide"), "sigma of link is 'wide'"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, change, message: str) -> None:
    table = json.loads(FILE.read_text("utf-8"))
    change(table)
    file = tmp_path / "parameters.json"
    file.write_text(json.dumps(table))
    with pytest.raises(SpecError, match=message):
        fitted(file)
