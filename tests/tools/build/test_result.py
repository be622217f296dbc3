"""tools/build/result.py: both kinds of build say the same things of themselves."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from npucompile.tools.build import driver, driver_device
from npucompile.tools.build.result import Report

REPORT = Report(Path("out"), seconds=3.0, ready_seconds=1.0, compiled={"decode-b1-q1": 2.0}, reused=("decode-b2-q1",))


def test_both_builds_return_it():
    assert driver.Report is Report
    assert driver_device.Report is Report


def test_what_was_done_cannot_be_changed_afterwards():
    with pytest.raises(dataclasses.FrozenInstanceError):
        REPORT.seconds = 0.0
    assert dataclasses.replace(REPORT, compiled={}) != REPORT
