"""Turns finished buckets of an unfinished build into files that the next build goes on from."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import msgpack

from ...lowering.artifact.artifact import ArtifactWriter
from ...lowering.artifact.manifest import GraphEntry, entry_of, plain_entry

SUFFIX = ".bucket"
_DIGEST = hashlib.sha256().digest_size


class Journal:
    """Buckets by the digest of their plan, in a directory that outlives the build.

    Args:
        directory: made when the first bucket is kept.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def keep(self, entry: GraphEntry, stages: bytes, graph: bytes) -> None:
        """Stores a bucket: whole, or not at all."""
        self.directory.mkdir(parents=True, exist_ok=True)
        file = self._file(entry.plan)
        part = file.with_suffix(f".{os.getpid()}.part")
        told = msgpack.packb({"entry": plain_entry(entry), "stages": stages, "graph": graph})
        part.write_bytes(hashlib.sha256(told).digest() + told)
        os.replace(part, file)

    def take(self, plan: str, writer: ArtifactWriter, suffix: str) -> GraphEntry | None:
        """The bucket of that plan, its files added to an artifact; None where there is none that is unharmed."""
        try:
            data = self._file(plan).read_bytes()
            if hashlib.sha256(data[_DIGEST:]).digest() != data[:_DIGEST]:
                return None
            told = msgpack.unpackb(data[_DIGEST:])
            entry = entry_of(told["entry"])
            stages, graph = bytes(told["stages"]), bytes(told["graph"])
        except (OSError, ValueError, TypeError, KeyError, msgpack.UnpackException):
            return None
        compiled = replace(entry.compiled, file=writer.add("graphs", graph, suffix)) if entry.compiled else None
        return replace(entry, stages=writer.add("stages", stages, "json.z"), compiled=compiled)

    def forget(self, plans: list[str]) -> None:
        """Removes buckets that an artifact has by now."""
        for plan in plans:
            self._file(plan).unlink(missing_ok=True)

    def _file(self, plan: str) -> Path:
        return self.directory / f"{plan}{SUFFIX}"
