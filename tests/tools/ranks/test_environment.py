"""tools/ranks/environment.py: the plan of an artifact yields to what the user has set, and says so."""

from __future__ import annotations

import io
import os
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from npucompile.graphs.errors import LoweringError, SpecError
from npucompile.graphs.types import Mesh
from npucompile.lowering.artifact.manifest import Variable
from npucompile.lowering.platform import Platform
from npucompile.lowering.switches import AIV
from npucompile.tools.builder.environment import environment
from npucompile.tools.builder.targets import target
from npucompile.tools.cli import Home
from npucompile.tools.progress import Progress
from npucompile.tools.ranks.environment import applied, merged, under
from npucompile.tools.ranks.rank_settings import RankSettings
from tests.support.vendors import put_vendor

PLAN = {
    "HCCL_BUFFSIZE": Variable("901", "the window"),
    "PYTORCH_NPU_ALLOC_CONF": Variable("expandable_segments:True", "no gaps"),
}


def test_what_is_not_set_is_set_and_what_the_user_has_set_stays():
    result = merged(PLAN, {"HCCL_BUFFSIZE": "2000", "HOME": "/"})
    assert result.variables == {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}
    (note,) = result.notes
    assert note == "HCCL_BUFFSIZE is '2000' in this environment and stays so; the artifact plans HCCL_BUFFSIZE=901: the window"


def test_an_allocator_that_is_configured_by_its_other_name_is_not_configured_twice():
    result = merged(PLAN, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"})
    assert set(result.variables) == {"HCCL_BUFFSIZE"}
    assert "PYTORCH_ALLOC_CONF is 'max_split_size_mb:64' in this environment and stays so" in result.notes[0]


def test_a_value_under_which_nothing_can_be_captured_is_refused_where_graphs_are():
    planned = environment(target("ascend-a3"), Mesh.parse("1"), {}, captured=True)
    assert merged(planned, {}).variables["TASK_QUEUE_ENABLE"] == "1"
    assert "stays so" in merged(planned, {"TASK_QUEUE_ENABLE": "0"}).notes[0]
    with pytest.raises(SpecError, match="TASK_QUEUE_ENABLE is '2' in this environment; legal is 1: torch_npu captures no graph"):
        merged(planned, {"TASK_QUEUE_ENABLE": "2"})
    assert merged(environment(target("ascend-a3"), Mesh.parse("1"), {}), {"TASK_QUEUE_ENABLE": "2"}).notes == ()


def test_an_empty_value_of_the_user_is_a_value():
    planned = environment(target("ascend-a3"), Mesh.parse("tp=2"), {"tp": 2**20})
    result = merged(planned, dict.fromkeys(planned, ""))
    assert (result.variables, len(result.notes)) == ({}, len(planned))


@pytest.mark.parametrize("device", ["npu", "emulated"])
def test_an_artifact_for_npus_sets_its_plan_and_says_what_it_leaves(monkeypatch, tmp_path, device):
    monkeypatch.setenv("HCCL_BUFFSIZE", "2000")
    # Set and deleted, so that what the plan sets is gone after the test.
    monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", "")
    monkeypatch.delenv("PYTORCH_NPU_ALLOC_CONF")
    artifact, output = SimpleNamespace(manifest=SimpleNamespace(environment=PLAN, platform={})), io.StringIO()
    home = applied(Home(tmp_path, {"HCCL_BUFFSIZE": "2000"}), artifact, RankSettings(device=device), Progress(output))
    assert home.environment == {"HCCL_BUFFSIZE": "2000", "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}
    assert {name: os.environ[name] for name in PLAN} == home.environment
    assert output.getvalue() == "".join(f"{note}\n" for note in merged(PLAN, {"HCCL_BUFFSIZE": "2000"}).notes)


def test_without_aiv_the_variable_is_not_set_whoever_set_it(monkeypatch, tmp_path):
    planned = {"HCCL_OP_EXPANSION_MODE": Variable("AIV", "fast")}
    artifact, output = SimpleNamespace(manifest=SimpleNamespace(environment=planned, platform={})), io.StringIO()
    for before in ({}, {"HCCL_OP_EXPANSION_MODE": "AIV"}):
        monkeypatch.setenv("HCCL_OP_EXPANSION_MODE", "AIV")
        settings = RankSettings(device="npu", off=frozenset({AIV}))
        assert applied(Home(tmp_path, before), artifact, settings, Progress(output)).environment == {}
        assert "HCCL_OP_EXPANSION_MODE" not in os.environ
    assert under(frozenset(), planned) == planned
    assert output.getvalue() == ""


def test_a_vendor_that_redefines_operators_of_cann_is_refused_before_anything_is_loaded(tmp_path):
    put_vendor(tmp_path / "vendors" / "custom_transformer", "ascend910_93", ["CausalConv1d", "RecurrentGatedDeltaRule"])
    artifact = SimpleNamespace(manifest=SimpleNamespace(environment={}, platform=asdict(Platform("ascend910_93", "9.0"))))
    home = Home(tmp_path, {"ASCEND_CUSTOM_OPP_PATH": str(tmp_path / "vendors" / "custom_transformer")})
    with pytest.raises(LoweringError, match=r"ops-info\.json defines RecurrentGatedDeltaRule, which the graphs take from CANN"):
        applied(home, artifact, RankSettings(device="npu"), Progress(io.StringIO()))


def test_the_address_of_a_machine_yields_to_an_interface_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("HCCL_IF_IP", "")
    monkeypatch.delenv("HCCL_IF_IP")
    artifact, output = SimpleNamespace(manifest=SimpleNamespace(environment={}, platform={})), io.StringIO()
    settings = RankSettings(device="npu")
    assert applied(Home(tmp_path, {}), artifact, settings, Progress(output), "10.0.0.2").environment == {"HCCL_IF_IP": "10.0.0.2"}
    own = {"HCCL_SOCKET_IFNAME": "eth7"}
    assert applied(Home(tmp_path, own), artifact, settings, Progress(output), "10.0.0.2").environment == own
    assert output.getvalue().startswith(
        "HCCL_SOCKET_IFNAME is 'eth7' in this environment and stays so; the artifact plans HCCL_IF_IP=10.0.0.2"
    )


def test_an_artifact_for_this_cpu_changes_no_variable(tmp_path):
    home, output = Home(tmp_path, {}), io.StringIO()
    artifact = SimpleNamespace(manifest=SimpleNamespace(environment=PLAN, platform={}))
    assert applied(home, artifact, RankSettings(device="cpu"), Progress(output)) is home
    assert output.getvalue() == ""
