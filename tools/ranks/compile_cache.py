"""Where GE keeps the graphs that it has compiled, so that only the first start of an artifact compiles.

GE loads what lies under a graph's key without looking at the graph, promises nothing between releases of CANN, refuses a directory that
does not exist, and writes a lock file even where it only reads (compiler/graph/build/model_cache.cc of hicann/ge; "graph build cache" of
CANN's graph development guide, atlasag_25_0063). So there is a directory for each release and chip, it is made here, and it is writable.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ...graphs.errors import SpecError

SHIPPED = "cache"
"""Directory of an artifact that holds compiled graphs by version, where a build had CANN to compile them."""


def shipped_directory(artifact: Path, version: str) -> Path:
    """The directory of an artifact's own compiled graphs for one device; it need not exist.

    Args:
        version: `Device.version`: release of CANN and name of the chip.

    Raises:
        SpecError: the version is no name of a directory.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", version):
        raise SpecError(f"the version of a device is {version!r}; legal are letters, digits, '.', '_' and '-'")
    return artifact / SHIPPED / version


def cache_directory(artifact: Path, home_cache: Path, version: str) -> Path:
    """The directory of compiled graphs for one device; it need not exist yet.

    Args:
        artifact: directory of the artifact.
        home_cache: `$NPUCOMPILE_HOME/cache`.
        version: `Device.version`: release of CANN and name of the chip.

    Returns:
        the artifact's own directory for that version, where it ships one and it can be written; else one in `home_cache`.

    Raises:
        SpecError: the version is no name of a directory.
    """
    shipped = shipped_directory(artifact, version)
    return shipped if shipped.is_dir() and os.access(shipped, os.W_OK) else home_cache / "ge" / version


def opened(directory: Path) -> Path:
    """The directory, made if it did not exist."""
    directory.mkdir(parents=True, exist_ok=True)
    return directory
