"""tools/laboratory.py: a module of the laboratory, or one sentence that says where it is."""

from __future__ import annotations

import pytest

from npucompile.graphs.errors import SpecError
from npucompile.tools import laboratory
from npucompile.tools.lab import fit


def test_a_module_is_given() -> None:
    assert laboratory.laboratory("fit", "calibrate") is fit


def test_its_absence_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laboratory.importlib.util, "find_spec", lambda *_: None)
    with pytest.raises(SpecError, match=r"`npucompile calibrate` needs the laboratory.*legal is to run it from a checkout"):
        laboratory.laboratory("calibration", "calibrate")
