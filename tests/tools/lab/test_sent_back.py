"""tools/lab/sent_back.py: what a bring-up measured becomes a patch that applies, and what it refuted is named."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from npucompile.graphs.errors import SpecError
from npucompile.lowering.ascend.cost.parameters import parameters
from npucompile.tools.cli import main
from npucompile.tools.lab import sent_back
from npucompile.tools.prove.bringup import archive
from npucompile.tools.prove.bringup.results import BringupFailure, RungResult, Timing

CHIP = "ascend910_93"
NOW = parameters(CHIP)


def sent(directory: Path, device: str = "npu", rates: dict[str, Any] | None = None) -> Path:
    """An archive of a bring-up whose memory is slow, whose collectives take 7 us more, and one of whose operators ended its process."""
    measured = rates or {
        "memory": {"measured": 0.7 * NOW.hbm_bytes_per_s, "nameplate": NOW.hbm_bytes_per_s},
        "bf16 product": {"measured": NOW.bf16_fraction * NOW.bf16_ops_per_s, "nameplate": NOW.bf16_ops_per_s},
        "launch, replayed": {"measured": 2e-6},
    }
    timings = [
        Timing("decode-b2-q4 a (HcomAllGather)", "", 30e-6, 64, 23e-6),
        Timing("decode-b64-q4 b (HcomAllGather)", "", 1.0, 1 << 20, 1e-6),
        Timing("decode-b2-q4 c (MoeDistributeDispatchV2)", "", 90e-6, 64, 70e-6),
    ]
    failure = BringupFailure("attention", "decode-b2-q4 d (FusedInferAttentionScore)", "aborted", "SIGABRT")
    rungs = [
        RungResult("environment", facts={"rates": measured}),
        RungResult("operators", failures=[failure], timings=[Timing("decode-b2-q4 e (GroupedMatmul)", "", 1e-3)]),
        RungResult("collectives", timings=timings, facts={"slow dies": ["rank 3: memory 1e+11, the median is 1.2e+12"]}),
        RungResult("alternation"),
    ]
    report = {"device": device, "model": "m", "mesh": "dp=1,tp=2", "target": "ascend-a3", "rungs": [rung.as_dict() for rung in rungs]}
    (directory / "bringup.json").write_text(json.dumps(report))
    return archive.write(directory, [directory / "bringup.json"], {}, CHIP, 0.0)


def test_what_was_measured_becomes_a_patch_that_applies(tmp_path: Path) -> None:
    patch = tmp_path / "hardware.patch"
    result = CliRunner().invoke(main, ["calibrate", "--archive", str(sent(tmp_path)), "--patch", str(patch)])
    assert result.exit_code == 0, result.output
    for path in (sent_back.PARAMETERS, sent_back.PAGE):
        copy = tmp_path / path.relative_to(sent_back.ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    subprocess.run(["git", "apply", str(patch)], cwd=tmp_path, check=True)
    table = json.loads((tmp_path / sent_back.PARAMETERS.relative_to(sent_back.ROOT)).read_text())
    now = json.loads(sent_back.PARAMETERS.read_text())
    changed = {name: entry["value"] for name, entry in table[CHIP].items() if entry != now[CHIP].get(name)}
    assert changed == {
        "memory_fraction": 0.7,
        "vector_launch_s": 2e-6,
        "collective_latency_s": pytest.approx(NOW.collective_latency_s + 7e-6),
        "exchange_latency_s": pytest.approx(NOW.exchange_latency_s + 20e-6),
    }
    assert table[CHIP]["memory_fraction"]["source"].startswith(f"bring-up of m dp=1,tp=2 on {CHIP}, CANN ?, driver ")
    assert {name: table[name] for name in table if name != CHIP} == {name: now[name] for name in now if name != CHIP}
    line = (tmp_path / "docs" / "on-hardware.md").read_text().splitlines()[-1]
    assert "refuted attention (decode-b2-q4 d (FusedInferAttentionScore) SIGABRT)." in line
    assert "grouped-products" in line.split("held ")[1].split(";")[0]
    assert "rank 3: memory 1e+11, the median is 1.2e+12" in result.output


def test_what_is_as_the_model_has_it_changes_nothing(tmp_path: Path) -> None:
    rates = {"memory": {"measured": NOW.memory_fraction * NOW.hbm_bytes_per_s, "nameplate": NOW.hbm_bytes_per_s}}
    found = sent_back.measured_parameters(sent_back.read(sent(tmp_path, rates=rates)))
    assert found.keys() == {"collective_latency_s", "exchange_latency_s"}


def test_rows_of_dtypes_stand_beside_those_of_the_machine(tmp_path: Path) -> None:
    read = sent_back.read(sent(tmp_path))
    one = {"input0": {"name": "x1", "dtype": "float16"}, "output0": {"name": "y", "dtype": "float16"}}
    text = "\n".join(sent_back.lines(sent_back.SentBack(read.report, {"cann": "9.1"}, {"MatMulV2": one})))
    assert "operators that it lacks:" in text
    assert "rows that it has otherwise:\n  row" in text
    assert "MatMulV2: " in text


def test_other_archives_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="was made on emulated; legal is a bring-up on NPUs"):
        sent_back.read(sent(tmp_path, "emulated"))
    (tmp_path / "other").write_text("no archive")
    with pytest.raises(SpecError, match=r"is no archive of a bring-up; legal is the bringup\.tar\.xz that it packs"):
        sent_back.read(tmp_path / "other")
    result = CliRunner().invoke(main, ["calibrate", "--patch", str(tmp_path / "p")])
    assert "legal is --archive FILE with it" in result.output
