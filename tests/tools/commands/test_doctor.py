"""tools/commands/doctor.py: every check, its advice, and the verdict."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from npucompile.graphs.errors import LoweringError
from npucompile.tools.cli import Home
from npucompile.tools.commands import doctor
from npucompile.tools.commands.doctor import ABSENT, MISSING, OK, Host, examine, healthy, look, verdict

VERSIONS = {
    "torch": "2.13.0+cpu",
    "torch_npu": "2.13.0",
    "protobuf": "7.36.2",
    "packaging": "26.3",
    "PyYAML": "6.0",
    "numpy": "2.4",
    "pyelftools": "0.33",
}

LAPTOP = Host(
    python="3.12.1",
    wanted_python="3.11",
    versions=VERSIONS,
    wanted_torch="2.13.0",
    cpu="A CPU, 2 cores",
    cxx="gcc version 12.2.0 at g++",
    cc="/usr/bin/cc",
    cann=None,
    npus=(),
    memory_bytes=8 * 2**30,
)


def by_name(machine):
    return {check.name: check for check in examine(machine)}


def without(*names):
    return {name: version for name, version in VERSIONS.items() if name not in names}


def test_a_complete_laptop_builds_everything_and_runs_on_its_cpu():
    checks = examine(LAPTOP)
    assert {check.name for check in checks if check.state != OK} == {"CANN runtime"}
    assert healthy(checks)
    assert [line.split(": ")[1] for line in verdict(checks)] == ["yes", "yes", "no, see CANN runtime"]


@pytest.mark.parametrize(
    ("change", "name", "advice"),
    [
        ({"python": "3.10.9"}, "python", "install Python 3.11 or newer"),
        ({"versions": {**VERSIONS, "torch": "2.12.0"}}, "torch", "pip install torch==2.13.0"),
        ({"versions": without("torch")}, "torch", "pip install torch==2.13.0"),
        ({"cxx": LoweringError("install g++ (apt install g++)")}, "C++ compiler", "install g++ (apt install g++)"),
        ({"memory_bytes": 2**30}, "memory", "a build needs 2 GiB"),
    ],
)
def test_what_the_cpu_needs_makes_the_machine_unfit(change, name, advice):
    checks = examine(replace(LAPTOP, **change))
    item = {check.name: check for check in checks}[name]
    assert item.state == MISSING
    assert advice in item.advice
    assert not healthy(checks)
    assert all(f"no, see {name}" in line for line in verdict(checks))


@pytest.mark.parametrize(
    ("change", "name", "advice"),
    [
        ({"versions": without("torch_npu")}, "torch_npu extra", "pip install 'npucompile[npu]'"),
        ({"versions": {**VERSIONS, "protobuf": "3.20.3"}}, "torch_npu extra", "protobuf is 3.20.3"),
        ({"cc": LoweringError("install one")}, "C compiler for stub CANN libraries", "install one"),
    ],
)
def test_what_only_ascend_needs_does_not(change, name, advice):
    checks = examine(replace(LAPTOP, **change))
    item = {check.name: check for check in checks}[name]
    assert (item.state, item.needed_for) == (MISSING, "ascend")
    assert advice in item.advice
    assert healthy(checks)
    assert [line.split(": ")[1].split(",")[0] for line in verdict(checks)] == ["yes", "no", "no"]


def test_with_cann_stubs_are_not_asked_for_and_npus_are():
    server = replace(LAPTOP, cann="ASCEND_HOME_PATH is /usr/local/Ascend", cc=LoweringError("none"), npus=("davinci0", "davinci1"))
    checks = by_name(server)
    assert "C compiler for stub CANN libraries" not in checks
    assert "CANN runtime" not in checks
    assert checks["CANN"].found == "ASCEND_HOME_PATH is /usr/local/Ascend"
    assert checks["NPU devices"].found == "2 (davinci0 to davinci1)"
    assert all(line.endswith("yes") for line in verdict(examine(server)))
    bare = by_name(replace(server, npus=()))["NPU devices"]
    assert (bare.state, bare.found) == (ABSENT, "none")
    assert "/dev/davinci0" in bare.advice


def test_a_system_that_does_not_tell_its_memory_is_given_the_benefit():
    assert by_name(replace(LAPTOP, memory_bytes=0))["memory"].state == OK


def test_any_torch_will_do_where_none_is_pinned():
    assert by_name(replace(LAPTOP, wanted_torch="", versions={**VERSIONS, "torch": "2.99"}))["torch"].state == OK


def test_npus_are_counted_by_their_device_files_in_order(tmp_path):
    for name in ("davinci10", "davinci2", "davinci_manager", "davinci", "null"):
        (tmp_path / name).touch()
    assert doctor.npu_files(tmp_path) == ["davinci2", "davinci10"]


def test_the_pinned_version_is_found_among_requirements():
    wanted = ["torch-geometric==1.0", "numpy>=2.0", "torch==2.13.0", "torch_npu==2.13.0; extra == 'npu'"]
    assert doctor.pinned(wanted, "torch") == "2.13.0"
    assert doctor.pinned(wanted, "torch_npu") == "2.13.0"
    assert doctor.pinned(wanted, "numpy") == ""


def test_this_machine_can_be_looked_at():
    machine = look({})
    assert machine.wanted_torch
    assert machine.versions["torch"].split("+")[0] == machine.wanted_torch
    assert machine.memory_bytes > 0
    assert "cores" in machine.cpu
    assert machine.cann is None
    assert look({"ASCEND_HOME_PATH": "/opt/cann"}).cann == "ASCEND_HOME_PATH is /opt/cann"
    assert json.dumps([check.found for check in examine(machine)])


def test_a_missing_compiler_is_a_line_and_no_crash(monkeypatch):
    def none():
        raise LoweringError("none found")

    monkeypatch.setattr(doctor, "compiler", none)
    monkeypatch.setattr(doctor, "find_compiler", none)
    machine = look({})
    assert (str(machine.cxx), str(machine.cc)) == ("none found", "none found")


# --- the command ---


@pytest.fixture
def run(tmp_path, monkeypatch):
    calls = []

    def call(*words, **change):
        def looked(environment):
            calls.append(environment)
            return replace(look({}), memory_bytes=8 * 2**30, **change)

        monkeypatch.setattr(doctor, "look", looked)
        return CliRunner().invoke(doctor.command, words, obj=Home(tmp_path, {"A": "b"}))

    call.seen = calls
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
    report = json.loads(result.output)
    assert report["healthy"] is (status == 0)
    compiler = next(check for check in report["checks"] if check["name"] == "C++ compiler")
    assert compiler == {
        "name": "C++ compiler",
        "state": "missing" if status else "ok",
        "found": "none" if status else "g++ 12",
        "needed_for": "cpu",
        "advice": "install g++" if status else "",
    }
