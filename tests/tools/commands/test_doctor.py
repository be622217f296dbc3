"""tools/commands/doctor.py: a table or JSON, and a status that scripts can use."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from npucompile.graphs.errors import LoweringError
from npucompile.tools.cli import Home
from npucompile.tools.commands import doctor
from npucompile.tools.doctor import look


@pytest.fixture
def run(tmp_path, monkeypatch):
    seen = []

    def call(*words, **change):
        def looked(environment):
            seen.append(environment)
            return replace(look({}), memory_bytes=8 * 2**30, **change)

        monkeypatch.setattr(doctor, "look", looked)
        return CliRunner().invoke(doctor.command, words, obj=Home(tmp_path, {"A": "b"}))

    call.seen = seen
    return call


def test_a_fit_machine_ends_with_status_0(run):
    result = run(cxx="g++ 12")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].startswith("ok       python ")
    assert "C++ compiler" in result.output
    assert "Build and serve on this CPU: yes" in lines
    # The environment comes from the command line's home, not from the process.
    assert run.seen == [{"A": "b"}]


def test_advice_stands_below_its_line_and_what_is_needed_ends_with_status_1(run):
    result = run(cxx=LoweringError("install g++"))
    assert result.exit_code == 1
    lines = result.output.splitlines()
    at = next(index for index, line in enumerate(lines) if "C++ compiler" in line)
    assert lines[at].split() == ["missing", "C++", "compiler", "none"]
    assert lines[at + 1].strip() == "install g++"
    assert lines[at + 1].index("install") == lines[at].index("none")


def test_what_only_ascend_needs_ends_with_status_0(run):
    result = run(cxx="g++ 12", versions={"torch": look({}).wanted_torch})
    assert result.exit_code == 0
    assert "pip install 'npucompile[npu]'" in result.output


@pytest.mark.parametrize(("cxx", "status"), [("g++ 12", 0), (LoweringError("install g++"), 1)])
def test_json_says_the_same(run, cxx, status):
    result = run("--json", cxx=cxx)
    assert result.exit_code == status
    told = json.loads(result.output)
    assert told["healthy"] is (status == 0)
    compiler = next(check for check in told["checks"] if check["name"] == "C++ compiler")
    assert compiler == {
        "name": "C++ compiler",
        "state": "missing" if status else "ok",
        "found": "none" if status else "g++ 12",
        "needed_for": "cpu",
        "advice": "install g++" if status else "",
    }
