"""tools/doctor.py: every check, its advice, and the verdict."""

from __future__ import annotations

import platform

import pytest

from npucompile.graphs.errors import LoweringError
from npucompile.tools import doctor
from npucompile.tools.doctor import ABSENT, MISSING, OK, examine, healthy, verdict

VERSIONS = {
    "torch": "2.13.0+cpu",
    "torch_npu": "2.13.0",
    "protobuf": "7.36.2",
    "packaging": "26.3",
    "PyYAML": "6.0",
    "numpy": "2.4",
    "pyelftools": "0.33",
}
CANN = {"ASCEND_HOME_PATH": "/usr/local/Ascend"}


def no_compiler():
    raise LoweringError("install one")


@pytest.fixture
def machine(monkeypatch):
    """Changes what the checks read of a complete laptop."""

    def change(**parts):
        for name, part in parts.items():
            owner = platform if name == "python_version" else doctor
            monkeypatch.setattr(owner, name, part if callable(part) else lambda *_, part=part: part)

    change(python_version="3.12.1", installed=VERSIONS, compiler=("g++", "gcc 12"), find_compiler="cc", available_bytes=8 * 2**30)
    return change


def by_name(environment):
    return {finding.name: finding for finding in examine(environment)}


def without(name):
    return {other: version for other, version in VERSIONS.items() if other != name}


def test_a_complete_laptop_builds_everything_and_runs_on_its_cpu(machine):
    findings = examine({})
    assert {finding.name for finding in findings if finding.state != OK} == {"CANN runtime"}
    assert healthy(findings)
    assert [line.split(": ")[1] for line in verdict(findings)] == ["yes", "yes", "no, see CANN runtime"]


CPU, ASCEND = ["no", "no", "no"], ["yes", "no", "no"]


@pytest.mark.parametrize(
    ("change", "name", "advice", "can"),
    [
        ({"python_version": "3.10.9"}, "python", "install Python 3.11 or newer", CPU),
        ({"installed": {**VERSIONS, "torch": "2.12.0"}}, "torch", "pip install torch==2.13.0", CPU),
        ({"installed": without("torch")}, "torch", "pip install torch==2.13.0", CPU),
        ({"compiler": no_compiler}, "C++ compiler", "install one", CPU),
        ({"available_bytes": 2**30}, "memory", "a build needs 2 GiB", CPU),
        ({"installed": without("torch_npu")}, "torch_npu extra", "pip install 'npucompile[npu]'", ASCEND),
        ({"installed": {**VERSIONS, "protobuf": "3.20.3"}}, "torch_npu extra", "protobuf is 3.20.3", ASCEND),
        ({"find_compiler": no_compiler}, "C compiler for stub CANN libraries", "install one", ASCEND),
    ],
)
def test_what_is_missing_is_named_with_advice(machine, change, name, advice, can):
    machine(**change)
    findings = examine({})
    finding = {finding.name: finding for finding in findings}[name]
    assert (finding.state, advice in finding.advice) == (MISSING, True)
    assert healthy(findings) is (can is ASCEND)
    assert [line.split(": ")[1].split(",")[0] for line in verdict(findings)] == can
    assert all(name in line for line in verdict(findings) if "no, see" in line)


def test_with_cann_stubs_are_not_asked_for_and_npus_are(machine):
    machine(find_compiler=no_compiler, npu_files=["davinci0", "davinci1"])
    findings = by_name(CANN)
    assert not {"C compiler for stub CANN libraries", "CANN runtime"} & findings.keys()
    assert findings["CANN"].found == "ASCEND_HOME_PATH is /usr/local/Ascend"
    assert findings["NPU devices"].found == "2 (davinci0 to davinci1)"
    assert all(line.endswith("yes") for line in verdict(list(findings.values())))
    machine(npu_files=[])
    bare = by_name(CANN)["NPU devices"]
    assert (bare.state, bare.found, "/dev/davinci0" in bare.advice) == (ABSENT, "none", True)


def test_what_cannot_be_known_is_given_the_benefit(machine):
    machine(available_bytes=0, pinned="", installed={**VERSIONS, "torch": "2.99"})
    findings = by_name({})
    assert (findings["memory"].state, findings["torch"].state) == (OK, OK)


def test_npus_are_counted_by_their_device_files_in_order(tmp_path):
    for name in ("davinci10", "davinci2", "davinci_manager", "davinci", "null"):
        (tmp_path / name).touch()
    assert doctor.npu_files(tmp_path) == ["davinci2", "davinci10"]


def test_the_pinned_version_is_found_among_requirements():
    wanted = ["torch-geometric==1.0", "numpy>=2.0", "torch==2.13.0", "torch_npu==2.13.0; extra == 'npu'"]
    assert [doctor.pinned(wanted, name) for name in ("torch", "torch_npu", "numpy")] == ["2.13.0", "2.13.0", ""]


def test_this_machine_can_be_looked_at():
    findings = by_name({})
    assert findings["torch"].state == OK
    assert "cores" in findings["cpu"].found
    assert "GiB available" in findings["memory"].found


def test_an_inventory_is_taken_of_a_cann_that_is_there(tmp_path):
    assert doctor.inventory_of({}) == []
    (tmp_path / "opp/built-in/op_impl/ai_core/tbe/kernel/ascend910b").mkdir(parents=True)
    found = {finding.name: finding for finding in doctor.inventory_of({"ASCEND_HOME_PATH": str(tmp_path)})}
    assert {"Python of CANN's compiler", "bisheng", "kernels of ascend910b"} <= set(found)
    assert "kernels of ascend910_93" not in found
    assert {finding.needed_for for finding in found.values()} == {"npu"}
    assert found["bisheng"].state == ABSENT
