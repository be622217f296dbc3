"""Turns the sources of this package into one digest: what was built by other sources is built again."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("graphs", "models", "lowering", "tools/build/stages.py", "tools/build/device_pool.py")
"""Folders and files that decide what a graph is, and what is told of it."""


@functools.cache
def digest(root: Path = ROOT) -> str:
    """sha256 of the names and contents of all Python files that decide graphs."""
    found = hashlib.sha256()
    for part in PARTS:
        place = root / part
        for file in [place] if place.is_file() else sorted(place.rglob("*.py")):
            found.update(f"{file.relative_to(root).as_posix()}\0".encode())
            found.update(hashlib.sha256(file.read_bytes()).digest())
    return found.hexdigest()
