"""tools/commands/doctor.py: the checks as lines and as JSON, and the status."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from click.testing import CliRunner

from npucompile.tools.cli import Home
from npucompile.tools.commands import doctor
from npucompile.tools.doctor import MISSING, OK, Finding
from npucompile.tools.host import HostFinding, read_host

FIT = [Finding("python", OK, "3.12.1", "cpu", ""), Finding("torch_npu extra", MISSING, "not installed", "ascend", "pip install it")]
UNFIT = [*FIT, Finding("C++ compiler", MISSING, "none", "cpu", "install g++")]


@pytest.fixture
def run(tmp_path, monkeypatch):
    def call(findings, *words):
        # The environment comes from the command line's home, not from the process.
        monkeypatch.setattr(doctor, "examine", lambda environment: {"b": findings}[environment["A"]])
        return CliRunner().invoke(doctor.command, words, obj=Home(tmp_path, {"A": "b"}))

    return call


def test_a_fit_machine_ends_with_status_0(run):
    result = run(FIT)
    lines = result.output.splitlines()
    assert (result.exit_code, lines[0].split()) == (0, ["ok", "python", "3.12.1"])
    assert "Build and serve on this CPU: yes" in lines


def test_a_code_is_explained_and_an_unknown_one_refused(run):
    result = run(FIT, "--error", "aclrtSynchronizeStream, error code is 507011")
    assert (result.exit_code, result.output.splitlines()[:2]) == (
        0,
        ["507011: a graph failed in its run", "next: npucompile bringup ARTIFACT --bisect BUCKET"],
    )
    refused = run(FIT, "--error", "999")
    assert refused.exit_code == 1
    assert "--error 999: no code that is known; known are E40020, " in str(refused.exception)


def test_advice_stands_below_its_line_and_what_is_needed_ends_with_status_1(run):
    result = run(UNFIT)
    lines = result.output.splitlines()
    at = next(index for index, line in enumerate(lines) if "C++ compiler" in line)
    assert (result.exit_code, lines[at].split()) == (1, ["missing", "C++", "compiler", "none"])
    assert lines[at + 1].strip() == "install g++"
    assert lines[at + 1].index("install") == lines[at].index("none")


@pytest.mark.parametrize(("findings", "status"), [(FIT, 0), (UNFIT, 1)])
def test_json_says_the_same(run, findings, status):
    result = run(findings, "--json")
    report = json.loads(result.output)
    assert (result.exit_code, report["healthy"]) == (status, status == 0)
    last = {"name": findings[-1].name, "state": MISSING, "found": findings[-1].found}
    assert report["checks"][-1] == last | {"needed_for": findings[-1].needed_for, "advice": findings[-1].advice}
    assert report["inventory"] == []
    assert [each["name"] for each in report["host"]] == [each.name for each in read_host()]


def test_what_the_kernel_is_set_to_is_shown_and_keeps_nothing_from_running(run, monkeypatch):
    asleep = HostFinding("vm.swappiness", "/proc/sys/vm/swappiness", "60", "0", "it swaps: sysctl -w vm.swappiness=0")
    monkeypatch.setattr(doctor, "read_host", lambda: [asleep])
    result = run(FIT)
    lines = result.output.splitlines()
    at = next(index for index, line in enumerate(lines) if "vm.swappiness  " in line)
    assert (lines[at].split()[0], lines[at].split()[-1], lines[at + 1].strip()) == ("-", "60", asleep.advice)
    assert result.exit_code == 0
    assert not [line for line in lines if line.endswith(("yes", "no")) and "swappiness" in line]
    assert json.loads(run(FIT, "--json").output)["host"] == [asdict(asleep)]
