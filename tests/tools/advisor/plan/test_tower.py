"""tools/advisor/plan/tower.py: what pictures take, against the published numbers of parameters and the arithmetic of the tower's layers."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from npucompile.tools.advisor.plan.parameters import fitted
from npucompile.tools.advisor.plan.system import PlannedMachine
from npucompile.tools.advisor.plan.tower import tower_cost
from npucompile.tools.builder.deployments import deployment
from npucompile.tools.builder.plan import Options, plan
from npucompile.tools.builder.rank_memory import planned_memory
from npucompile.tools.cli import main
from npucompile.tools.notation import EncodeSize


@pytest.mark.parametrize(("model", "parameters"), [("qwen3.5-397b", 456_010_480), ("qwen3.5-27b", 460_730_096)])
def test_weights_are_those_of_the_published_towers(model, parameters):
    cost = tower_cost(model, "bf16", PlannedMachine("ascend-a3"), fitted())
    assert cost is not None
    # Heads of 72 channels are stored as 80.
    assert cost.weights_bytes / 2 == parameters + 27 * 16 * 8 * (4 * 1152 + 3)


@pytest.mark.parametrize("row", ["qwen35-397b-a3x8-in3k5-out1k5-50ms", "qwen35-397b-a3x8-mix-128k-longctx", "qwen35-27b-mix-tp2-dp1-133k"])
def test_weights_are_those_that_a_build_has(row):
    published = deployment(row)
    memory = planned_memory(plan(Options(published.model, deployment=row, encode=(EncodeSize(256),))))
    cost = tower_cost(published.model, published.quantization, PlannedMachine("ascend-a3"), fitted())
    assert cost is not None
    assert [part.nbytes for part in memory.parts if part.name == "vision tower"] == [cost.weights_bytes]


def test_steps_take_no_less_than_their_operations_and_attention_grows_by_the_square():
    machine = PlannedMachine("ascend-a3")
    cost = tower_cost("qwen3.5-397b", "bf16", machine, fitted())
    assert cost is not None
    # 0.826 GFLOP a patch, 124,416 a pair of patches and 80 MFLOP a token, of 27 layers of 1152 channels.
    for patches, ms in cost.encode_ms.items():
        operations = 0.826e9 * patches + 124_416 * patches**2 + 80e6 * patches / 4
        assert ms > 1e3 * operations / machine.npu.bf16_ops_per_s
    times = list(cost.encode_ms.values())
    assert times[2] / times[1] > 4


def test_models_without_a_tower_take_none():
    assert tower_cost("qwen3-32b", "w8a8", PlannedMachine("ascend-a3"), fitted()) is None


def test_a_row_with_pictures_says_what_they_take():
    name = "qwen35-397b-a3x8-in128k-out1k-20ms"
    result = CliRunner().invoke(main, ["plan", "--deployment", name])
    assert result.exit_code == 0, result.output
    (line,) = [line for line in result.output.splitlines() if line.startswith("pictures")]
    assert "tower 0.61 GiB of a rank, 8 KiB a token" in line
    data = json.loads(CliRunner().invoke(main, ["plan", "--deployment", name, "--json"]).stdout)
    assert data["pictures"]["row_bytes"] == 2 * 4096
    assert list(data["pictures"]["encode_ms"]) == ["256", "1024", "4096"]
