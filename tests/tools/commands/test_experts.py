"""tools/commands/experts.py: a plan is printed, and written for a build."""

from __future__ import annotations

import json

import torch
from click.testing import CliRunner

from npucompile.tools.builder.expert_map import read
from npucompile.tools.builder.expert_planner import planned
from npucompile.tools.cli import main


def test_a_plan_of_a_recorders_file(npu_artifact, tmp_path):
    counts = torch.tensor([[[90, 1, 1, 1, 40, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 70]]])
    torch.save({"rank": 0, "logical_count": counts}, tmp_path / "counts.pt")
    words = ["experts", str(npu_artifact("dp=2,tp=2")), str(tmp_path / "counts.pt"), "--copies", "8", "--out", str(tmp_path / "map.json")]
    shown = CliRunner().invoke(main, words)
    assert shown.exit_code == 0, shown.output
    assert [line.split("  ")[0] for line in shown.output.splitlines()[1:]] == ["as built", "planned, 0 copies", "planned, 8 copies"]
    assert read(str(tmp_path / "map.json")).rows == planned(counts[0].tolist(), 16, 4)
    data = json.loads(CliRunner().invoke(main, [*words, "--json"]).output)
    assert data[0]["imbalance"] > data[-1]["imbalance"]
    assert data[0]["step_ms"]["prefill-b1-q4"] > data[-1]["step_ms"]["prefill-b1-q4"]
