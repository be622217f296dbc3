"""The wheel of the working tree."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOT_SOURCES = (".*", "__pycache__", "dist", "artifacts", "*.egg-info")


def built(place: Path) -> Path:
    """A wheel in a folder, built from a copy of the tree there, so that neither affects the other's build folder."""
    shutil.copytree(ROOT, place / "source", ignore=not_sources)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(place), str(place / "source")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = place.glob("*.whl")
    return file


def not_sources(folder: str, names: list[str]) -> set[str]:
    """Names that are not copied; `build` only at the root, since tools/builder is a package."""
    return shutil.ignore_patterns(*NOT_SOURCES)(folder, names) | ({"build"} if Path(folder) == ROOT else set())
