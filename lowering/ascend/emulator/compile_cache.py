"""The cache of compiled graphs of an emulated device, which like GE's finds a graph by its key and nothing else."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ....graphs.errors import LoweringError

DIRECTORY, KEY = "ge.graph_compiler_cache_dir", "ge.graph_key"
"""GE's options: an existing directory, and the name of the graph in it; both or neither."""


@dataclass(frozen=True)
class CompileCache:
    """The place of one graph in the cache; without a directory nothing is kept."""

    directory: Path | None
    key: str
    version: str

    @classmethod
    def of(cls, options: Mapping[str, str], version: str) -> CompileCache:
        """The place that compile options name.

        Raises:
            LoweringError: the directory is not there, or there is one without a key.
        """
        directory, key = options.get(DIRECTORY, ""), options.get(KEY, "")
        if not directory:
            return cls(None, "", version)
        if not key or not Path(directory).is_dir():
            raise LoweringError(f"{DIRECTORY} is {directory!r} with {KEY} {key!r}; legal are an existing directory and a key")
        return cls(Path(directory), key, version)

    def compiled(self, graph: bytes, formats: Sequence[int]) -> bool:
        """Keeps a compiled graph, or finds it.

        Args:
            graph: its digest.
            formats: of its operands.

        Returns:
            whether it was there.

        Raises:
            LoweringError: something else is cached under the key; a device would run that.
        """
        if self.directory is None:
            return False
        record = {"graph": graph.hex(), "formats": list(formats), "version": self.version}
        path = self.directory / f"{self.key}.idx"
        if path.is_file():
            if (found := json.loads(path.read_text(encoding="utf-8"))) != record:
                differing = sorted(name for name in record if found.get(name) != record[name])
                raise LoweringError(
                    f"another graph is cached under the same key {self.key} in {self.directory}: {', '.join(differing)} differ, found"
                    f" {[found.get(name) for name in differing]}, compiled {[record[name] for name in differing]}"
                )
            return True
        # Ranks share the directory; a record is there whole or not at all.
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(record), encoding="utf-8")
        temporary.replace(path)
        return False
