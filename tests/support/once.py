"""What many test files read and no test changes is made once a run, by the first of its workers that needs it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A directory of that name, which `make` has filled in this run, here or in another worker of pytest-xdist; not to be changed."""
    base = factory.getbasetemp()
    # The folder of a worker lies in that of its run.
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "made-once" / name
    folder.parent.mkdir(exist_ok=True)
    whole = folder.with_name(f"{name}.whole")
    with FileLock(folder.with_name(f"{name}.lock")):
        if not whole.exists():
            # A worker that failed may have left a part.
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            whole.touch()
    return folder
