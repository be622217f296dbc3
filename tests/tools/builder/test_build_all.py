"""tools/builder/build_all.py: one artifact per plan, two for a disaggregated deployment, and the summary that is printed first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from npucompile.graphs.errors import SpecError
from npucompile.tools.builder import build_all
from npucompile.tools.builder.driver import BuildReport

SPLIT = "qwen35-397b-a3x24-pd-1p1d-3node"


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Path]]:
    """What the device builder is asked for; it builds nothing."""
    calls: list[tuple[Any, Path]] = []

    def build(plan: Any, out: Path, cache: Path, progress: Any, *, jobs: int, nice: int, made: Any) -> BuildReport:
        calls.append((plan, out))
        return BuildReport(out, 0.0, 0.0, {}, ())

    monkeypatch.setattr(build_all, "build", build)
    # It lowers the largest steps (tests/tools/builder/test_answers.py).
    monkeypatch.setattr(build_all, "answer", lambda plan, priced: plan)
    return calls


def test_one_side_goes_where_both_would_put_it(built: list[tuple[Any, Path]], tmp_path: Path) -> None:
    build_all.build_all("qwen3.5-397b", {"deployment": SPLIT, "phase": "decode"}, None, tmp_path, tmp_path, 1, 0)
    build_all.build_all("qwen3.5-397b", {"deployment": SPLIT}, tmp_path / "here", tmp_path, tmp_path, 1, 0)
    assert [out.name for _, out in built] == ["qwen3.5-397b-decode", "here-prefill", "here-decode"]


def test_both_sides_are_decided_before_one_is_built(built: list[tuple[Any, Path]], tmp_path: Path) -> None:
    # Of the two only the decoding side has rows to fill.
    options = {"deployment": SPLIT, "buckets": (64,), "max_num_seqs": 32}
    with pytest.raises(SpecError, match="max_num_seqs is 32 and the largest bucket has 64 rows"):
        build_all.build_all("qwen3.5-397b", options, None, tmp_path, tmp_path, 1, 0)
    assert built == []


def test_a_build_without_the_devices_compiler_says_what_the_first_start_does(built: list[tuple[Any, Path]], tmp_path: Path) -> None:
    build_all.build_all("qwen3.5-tiny", {"target": "ascend-a3", "buckets": (2,)}, tmp_path / "npu", tmp_path, tmp_path, 1, 0)
    build_all.build_all("qwen3.5-tiny", {"buckets": (2,), "backend": "eager"}, tmp_path / "cpu", tmp_path, tmp_path, 1, 0)
    notes = [build_all.first_start(plan) for plan, _ in built]
    assert "no CANN; the first start there compiles each bucket" in str(notes[0])
    assert notes[1] is None
