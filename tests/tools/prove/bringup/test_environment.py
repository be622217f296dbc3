"""tools/prove/bringup/environment.py: versions and variables are written down, and what does not fit is a failure."""

from __future__ import annotations

import pytest

from npucompile.lowering.ascend.emulator.device import open_device
from npucompile.tools.host import read_host
from npucompile.tools.prove.bringup.device_graph import Host
from npucompile.tools.prove.bringup.environment import cann_release, check_environment, driver_version


@pytest.fixture
def planned(npu_artifact):
    return {name: setting.value for name, setting in npu_artifact.manifest.environment.items()}


def test_versions_and_variables_are_facts(npu_artifact, planned, tmp_path):
    failures, facts = check_environment(npu_artifact, Host(open_device(0), tmp_path), planned)
    assert failures == []
    assert (facts["device"], facts["ranks"], facts["environment"]) == ("emulated:0", 1, planned)
    assert facts["built_with"]["torch_npu"]
    assert facts["host"] == {each.name: each.found for each in read_host()}
    assert {each.name for each in read_host() if each.advice} == {
        name for name in facts["host"] for note in facts["notes"] if note.startswith(name)
    }


def test_an_older_cann_and_missing_variables_are_failures(npu_artifact, tmp_path):
    device = open_device(0)
    device.version = "cann-8.2.rc1-Ascend910"
    failures, _ = check_environment(npu_artifact, Host(device, tmp_path), {})
    assert [failure.assumption for failure in failures] == ["toolchain", "toolchain"]
    assert "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True" in failures[0].message
    assert "cann-8.2.rc1-Ascend910" in failures[1].message
    assert "8.5.0" in failures[1].message
    assert cann_release(device) == (8, 2)


def test_what_a_cann_lacks_is_a_failure_with_the_next_command(npu_artifact, planned, tmp_path):
    """An empty directory has nothing of it."""
    failures, facts = check_environment(npu_artifact, Host(open_device(0), tmp_path), {**planned, "ASCEND_HOME_PATH": str(tmp_path)})
    chip = npu_artifact.manifest.platform["chip"]
    assert {f"kernels of {chip}", f"operators of {chip}", "Python of CANN's compiler"} <= {failure.what for failure in failures}
    assert facts["inventory"][f"kernels of {chip}"] == "none"


def test_a_device_that_returns_something_else_is_named(npu_artifact, planned, tmp_path, monkeypatch):
    host = Host(open_device(0), tmp_path)
    monkeypatch.setattr(host, "write", lambda memory, value: memory.zero_())
    failures, _ = check_environment(npu_artifact, host, planned)
    assert [failure.assumption for failure in failures] == ["device"]


def test_the_driver_says_its_version(tmp_path):
    file = tmp_path / "version.info"
    assert driver_version(file) == ""
    file.write_text("Version=25.0.rc1\nascendhal_version=7.35\n")
    assert driver_version(file) == "25.0.rc1"
