"""tools/builder/environment.py: ranks get the variables that their communicators need, within the limits that CANN documents."""

from __future__ import annotations

import pytest

from npucompile.graphs.types import Mesh
from npucompile.tools.builder.environment import environment
from npucompile.tools.builder.targets import target

MIB = 2**20


def variables(name, mesh, sizes):
    return {variable: setting.value for variable, setting in environment(target(name), Mesh.parse(mesh), sizes).items()}


def test_a_cpu_needs_none_and_a_single_npu_needs_no_communication():
    assert variables("cpu", "dp=2,tp=2", {"tp": MIB}) == {}
    assert variables("ascend-a3", "1", {}) == {
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
        "ASCEND_CONNECT_TIMEOUT": "10000",
        "ASCEND_TRANSFER_TIMEOUT": "10000",
        "ASCEND_BASE_PORT": "11000",
    }


def test_the_window_of_dispatch_is_what_its_kernels_read_rounded_up():
    sizes = {"tp": 200 * MIB, "dispatch": 900 * MIB + 1}
    assert variables("ascend-a3", "dp=8,tp=2", sizes)["HCCL_BUFFSIZE"] == "901"
    assert variables("ascend-a3", "dp=8,tp=2", {"tp": 300 * MIB})["HCCL_BUFFSIZE"] == "200"


@pytest.mark.parametrize(
    ("name", "mesh", "symbols", "aiv"),
    [
        ("ascend-a3", "dp=8,tp=2", ("dp", "tp", "world", "dispatch"), True),
        ("ascend-a2", "tp=8", ("tp", "world"), True),
        ("ascend-a2", "dp=2,tp=4", ("tp",), True),
        ("ascend-a2", "dp=2,tp=4", ("tp", "world"), False),
    ],
)
def test_an_a2_runs_collectives_on_vector_cores_for_one_communicator_only(name, mesh, symbols, aiv):
    assert ("HCCL_OP_EXPANSION_MODE" in variables(name, mesh, dict.fromkeys(symbols, MIB))) == aiv


def test_limits_are_those_of_the_reference_and_every_variable_has_a_reason():
    planned = environment(target("ascend-a3"), Mesh.parse("dp=2,tp=2"), {"tp": MIB, "dispatch": MIB})
    assert 120 <= int(planned["HCCL_CONNECT_TIMEOUT"].value) <= 7200
    assert 60 < int(planned["HCCL_EXEC_TIMEOUT"].value) <= 1091, "longer than a step on the host, legal in AIV mode"
    assert planned["HCCL_DETERMINISTIC"].value == "false"
    assert all(len(setting.why) > 20 and not setting.why.endswith(".") for setting in planned.values())
