"""tools/advisor/plan/expert_load.py: counts become predictions with experts in order, planned and copied."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from npucompile.graphs.errors import SpecError
from npucompile.tools.advisor.plan.expert_load import placements
from npucompile.tools.advisor.plan.parameters import fitted
from npucompile.tools.advisor.plan.published import case_of
from npucompile.tools.cli import main

ROW = "qwen35-397b-a3x8-in3k5-out1k5-50ms"


def counts(path: Path, busy: int) -> str:
    """Counts of 512 experts in 60 layers, the first of which are chosen more often."""
    path.write_text(json.dumps({"logical_count": [[busy if expert < 32 else 10 for expert in range(512)] for _ in range(60)]}))
    return str(path)


def test_a_planned_map_is_faster_where_experts_are_busy_and_copies_are_no_slower(tmp_path: Path) -> None:
    words = ["plan", "--deployment", ROW, "--expert-map", counts(tmp_path / "busy.json", 40), "--json"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["experts"]
    assert [*found] == ["in order", "planned", "planned, 16 copies"]
    # A rank has 32 experts: the first has 32 x 40 tokens, the mean is (32 x 40 + 480 x 10) / 16.
    assert found["in order"]["imbalance"] == pytest.approx(1280 / 380, abs=1e-3)
    assert found["planned"]["imbalance"] == pytest.approx(1.0, abs=1e-3)
    assert found["planned"]["output_tok_s"] > 1.05 * found["in order"]["output_tok_s"]
    assert "busiest / mean 3.37" in CliRunner().invoke(main, words[:-1]).output


def test_what_has_no_counts_or_no_spread_experts_is_refused(tmp_path: Path) -> None:
    file = counts(tmp_path / "even.json", 10)
    with pytest.raises(SpecError, match="are not spread over ranks"):
        placements(file, case_of("qwen3-32b-a3x2-mix-2k-2k-50ms"), fitted())
    (tmp_path / "map.json").write_text(json.dumps({"physical_to_logical_map": [[*range(512)]] * 60}))
    with pytest.raises(SpecError, match="legal is logical_count"):
        placements(str(tmp_path / "map.json"), case_of(ROW), fitted())
    words = ["plan", "qwen3-32b", "--cards", "2", "--input", "100", "--output", "100", "--concurrency", "2", "--expert-map", file]
    assert "--expert-map with a MODEL, which is searched" in CliRunner().invoke(main, words).output


def test_a_load_is_no_deployment() -> None:
    assert "is not known" in CliRunner().invoke(main, ["plan", "--deployment", "qwen35-397b-va-16k-36"]).output
