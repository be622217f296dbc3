"""The cache of compiled graphs of an emulated device, which like GE's finds a graph by its key and nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ....graphs.errors import LoweringError

DIRECTORY, KEY = "ge.graph_compiler_cache_dir", "ge.graph_key"
"""GE's options: an existing directory, and the name of the graph in it; both or neither."""


def compiled(options: Mapping[str, str], version: str, graph: bytes, formats: Sequence[int]) -> bool:
    """Keeps a compiled graph, or finds it; without a directory nothing is kept.

    Args:
        options: of the compilation.
        version: of the device.
        graph: its digest.
        formats: of its operands.

    Returns:
        whether it was there.

    Raises:
        LoweringError: the directory is not there, there is one without a key, or something else is cached under the key; a device would
            run that.
    """
    directory, key = options.get(DIRECTORY, ""), options.get(KEY, "")
    if not directory:
        return False
    if not key or not Path(directory).is_dir():
        raise LoweringError(f"{DIRECTORY} is {directory!r} with {KEY} {key!r}; legal are an existing directory and a key")
    record = {"graph": graph.hex(), "formats": list(formats), "version": version}
    path = Path(directory) / f"{key}.idx"
    if path.is_file():
        if (cached := json.loads(path.read_text(encoding="utf-8"))) != record:
            differing = sorted(name for name in record if cached.get(name) != record[name])
            raise LoweringError(
                f"another graph is cached under the same key {key} in {directory}: {', '.join(differing)} differ, found"
                f" {[cached.get(name) for name in differing]}, compiled {[record[name] for name in differing]}"
            )
        return True
    # Ranks share the directory; a record is there whole or not at all.
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(record), encoding="utf-8")
    temporary.replace(path)
    return False
