"""tools/prove/bringup/archive.py: what is sent back has what was found and of which machine, no secrets, and is small."""

from __future__ import annotations

import json
import os
import random
import tarfile
from pathlib import Path

import pytest

from npucompile.lowering.ascend.inventory import TBE
from npucompile.tools.prove.bringup import archive

CHIP = "ascend910_93"


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """A machine with CANN's tables and logs, and its environment."""
    cann, logs = tmp_path / "cann", tmp_path / "log"
    (folder := cann / TBE / "config" / CHIP).mkdir(parents=True)
    (folder / f"aic-{CHIP}-ops-info.json").write_text('{"MatMul": {}}')
    (folder.parent / "other").mkdir()
    (logs / "debug").mkdir(parents=True)
    (logs / "debug" / "plog_1.log").write_text("".join(f"line {i}\n" for i in range(1000)))
    (logs / "old.log").write_text("of yesterday\n")
    os.utime(logs / "old.log", (1, 1))
    return {
        "ASCEND_HOME_PATH": str(cann), "ASCEND_PROCESS_LOG_PATH": str(logs), "HCCL_BUFFSIZE": "200", "HCCL_IF_KEY": "hidden",
        "NPUCOMPILE_API_KEY": "hidden", "NPUCOMPILE_RANK_TOKEN": "hidden", "EDITOR": "vi",
        "ORACLE_DSN": "hidden", "INPUT_TEXT": "hidden",
    }  # fmt: skip


def sent(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive.getmembers()}


def test_findings_machine_tables_and_ends_of_new_logs_are_sent(tmp_path: Path, machine: dict[str, str]) -> None:
    report = tmp_path / "bringup.json"
    report.write_text('{"passed": true}')
    path = archive.write(tmp_path, [report, tmp_path / "absent.html"], machine, CHIP, since=100.0)
    found = sent(path)
    assert [*found] == ["bringup.json", "machine.json", f"ops-info/aic-{CHIP}-ops-info.json", "plog/debug/plog_1.log"]
    assert found["plog/debug/plog_1.log"].decode().splitlines() == [f"line {i}" for i in range(800, 1000)]
    facts = json.loads(found["machine.json"])
    assert facts["environment"] == {name: machine[name] for name in ("ASCEND_HOME_PATH", "ASCEND_PROCESS_LOG_PATH", "HCCL_BUFFSIZE")}
    assert facts["packages"]["torch"].startswith("2.13.0")
    assert b"hidden" not in b"".join(found.values())


def test_what_has_no_room_is_named(tmp_path: Path, machine: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MOST_BYTES", 20_000)
    noise = random.Random(0).randbytes(30_000)
    (tmp_path / "log" / "big.log").write_bytes(noise)
    path = archive.write(tmp_path, [], machine, CHIP, since=100.0)
    found = sent(path)
    assert path.stat().st_size < 20_000
    assert found["left-out.txt"].decode() == "plog/big.log: no room in 20000 bytes\n"
    assert {"machine.json", "plog/debug/plog_1.log"} <= found.keys()


def test_a_machine_without_cann_sends_what_was_found(tmp_path: Path) -> None:
    path = archive.write(tmp_path, [], {"HOME": str(tmp_path)}, CHIP, since=0.0)
    assert [*sent(path)] == ["machine.json"]
