"""tools/commands/replay.py: what a server recorded is repeated by the command, on its own artifact or against another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import tiny

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.engine import Engine
from npucompile.runtime.journal import Journal, JournalFile, read
from npucompile.runtime.request import Request, Sampling
from npucompile.tools.serve.recording import facts_of


@pytest.fixture(scope="module")
def recorded(tiny_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The journal of three sampled requests."""
    artifact = Artifact.open(tiny_artifact)
    engine = Engine(CpuExecutor(artifact), refresh_every_s=None)
    file = tmp_path_factory.mktemp("journal") / "run.journal"
    journal = JournalFile(file, facts_of(artifact, engine))
    engine.stepper.journal = Journal(journal.write)
    for i in range(3):
        engine.submit(Request(f"r{i}", (i, 2, 3), 6, Sampling(1.0)), lambda _: None)
    while engine.step():
        pass
    journal.close()
    return file


def test_a_run_repeats(recorded: Path, tmp_path: Path) -> None:
    result = tiny.cli(tmp_path, "replay", recorded)
    assert result.exit_code == 0, result.output
    assert "of 3 requests repeated" in result.stdout
    assert result.stdout.endswith("nothing differs\n")


def test_a_run_that_was_cut_repeats_up_to_there_and_a_changed_one_is_refused(recorded: Path, tmp_path: Path) -> None:
    data = recorded.read_bytes()
    (tmp_path / "cut").write_bytes(data[:-40])
    result = tiny.cli(tmp_path, "replay", tmp_path / "cut")
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "nothing differs, up to where the record was cut")
    (tmp_path / "changed").write_bytes(data[: len(data) // 2] + b"\x81\x01" + data[len(data) // 2 + 2 :])
    assert "is not what was written" in tiny.refused(tmp_path, "replay", tmp_path / "changed")


def test_another_artifact_is_refused_or_compared(recorded: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    tiny.built(tiny.planned(tiny.write_checkpoint(tmp_path / "checkpoint", seed=8)), other)
    assert "legal is the same one, or --any-artifact" in tiny.refused(tmp_path, "replay", recorded, "--artifact", other)
    result = tiny.cli(tmp_path, "replay", recorded, "--artifact", other, "--any-artifact")
    assert result.exit_code == 1
    # Whose first token is not the same by chance: two random models draw with the same random numbers.
    assert re.search(r"step \d+ is the first that differs\n  recorded: \['result', .*\n  repeated: \['result', ", result.stdout)


def test_what_cannot_be_repeated_is_refused(recorded: Path, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("{}")
    assert "legal is a journal of `npucompile serve --record`" in tiny.refused(tmp_path, "replay", tmp_path / "other")
    facts, _ = read(recorded)
    JournalFile(tmp_path / "ahead", {**facts, "run_ahead": 1}).close()
    assert "was recorded with run_ahead 1; legal here is up to 0" in tiny.refused(tmp_path, "replay", tmp_path / "ahead")
