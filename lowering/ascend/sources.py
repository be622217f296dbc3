"""Digest of the sources that decide what is made of a lowered graph, and whether it is legal."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

_ROOT = Path(__file__).parent
_WITHOUT = ("emulator", "cost")
"""Folders that read graphs and make none."""


@functools.cache
def digest(root: Path = _ROOT) -> str:
    """Digest of converters, linker, options and the table of legality below `root`, as an option of a compile (`Backend.options`).

    The key of an executable is made of the lowered graph, which does not change when its conversion does: without this, a build by a
    newer release would keep what an older one made, and would not check it again.
    """
    hashed = hashlib.sha256()
    for file in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".json")):
        name = file.relative_to(root)
        if name.parts[0] not in _WITHOUT:
            content = file.read_bytes()
            hashed.update(f"{name.as_posix()} {len(content)}:".encode() + content)
    return hashed.hexdigest()
