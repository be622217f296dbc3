"""tools/commands/calibrate.py: what cannot be written is refused before anything is fitted; without the laboratory so is all."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import tiny

from npucompile.tools import laboratory


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    assert "is no directory" in tiny.refused(tmp_path, "calibrate", "--out", str(tmp_path / "no" / "file"))


def test_without_the_laboratory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laboratory.importlib.util, "find_spec", lambda *_: None)
    assert "`npucompile calibrate` needs the laboratory, which is in the repository and not in the wheel" in tiny.refused(
        tmp_path, "calibrate"
    )
