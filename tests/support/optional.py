"""What a test needs beside the package: missing it is a skip that says how to get it, and a failure where CI should have brought it."""

from __future__ import annotations

import importlib.util
import os
import shutil

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def needs_module(name: str, brought_by: str) -> None:
    """Skips the test where a module is not installed."""
    try:
        found = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        _missing(f"{name} is not installed: {brought_by}")


def browser() -> str:
    """Path of a Chromium; skips the test where there is none."""
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        _missing("no Chromium is installed: apt-get install chromium")
    return str(path)


def _missing(what: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(what)
    pytest.skip(what)
