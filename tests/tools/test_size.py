from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from npucompile.tools.size import BUDGET_LINES, FileSize, code_lines, measure, report

SOURCE = '''"""Module docstring,
of two lines."""

import os  # code with a comment

# a comment alone
LIMIT = 3
"""A note under a constant."""


def f(x):
    """One line."""
    text = """code,
    though a string"""
    return (
        x,

        text,
    )
'''


@pytest.mark.parametrize(
    ("source", "lines"),
    [("", 0), ("\n\n# only\n", 0), ("x = 1\n", 1), ('"""Doc."""\n', 0), ("x = (\n\n1,\n)\n", 3), (SOURCE, 9)],
)
def test_counts_code_only(source: str, lines: int) -> None:
    assert code_lines(source) == lines


def test_measures_largest_first(tmp_path: Path) -> None:
    tree = {"graphs/a.py": "x = 1\n", "graphs/ops/b.py": "x = 1\n\ny = 2\n", "tests/test_a.py": "a\nb\nc\n", "docs/n.py": "z"}
    for path, source in tree.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(source)
    assert measure(tmp_path) == [FileSize("tests/test_a.py", 3, 3), FileSize("graphs/ops/b.py", 2, 3), FileSize("graphs/a.py", 1, 1)]


def test_reports_folders_and_the_budget() -> None:
    over, within = FileSize("graphs/ops/b.py", 500, BUDGET_LINES + 1), FileSize("models/m.py", 20, BUDGET_LINES)
    text = report([over, within, FileSize("graphs/a.py", 7, 9), FileSize("tests/test_a.py", 600, 900)])
    rows = [line.split() for line in text.splitlines()]
    assert ["500", "401", "graphs/ops/b.py", "(over", "budget)"] in rows
    assert ["20", "400", "models/m.py"] in rows
    assert ["507", "410", "graphs/", "in", "2", "files"] in rows
    assert ["600", "900", "tests/test_a.py"] in rows
    assert rows[-1][:2] == ["1127", "1710"]


def test_runs_as_a_module(tmp_path: Path) -> None:
    process = subprocess.run([sys.executable, "-m", "npucompile.tools.size"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "graphs/types.py" in process.stdout
    assert process.stderr == ""
