"""Stores the finished buckets of a build that may be interrupted, so that the next build continues from them."""

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


class UnfinishedBuild:
    """Buckets by their stamp, in a directory that outlives the build.

    Args:
        directory: created when the first bucket is stored.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def keep(self, entry: GraphEntry, stages: bytes, graph: bytes) -> None:
        """Stores a bucket, atomically."""
        self.directory.mkdir(parents=True, exist_ok=True)
        file = self._file(entry.stamp)
        part = file.with_suffix(f".{os.getpid()}.part")
        packed = msgpack.packb({"entry": plain_entry(entry), "stages": stages, "graph": graph})
        part.write_bytes(hashlib.sha256(packed).digest() + packed)
        os.replace(part, file)

    def take(self, stamp: str, writer: ArtifactWriter, suffix: str) -> GraphEntry | None:
        """The bucket of that stamp, its files added to an artifact; None if there is none, or it is damaged."""
        try:
            data = self._file(stamp).read_bytes()
            if hashlib.sha256(data[_DIGEST:]).digest() != data[:_DIGEST]:
                return None
            fields = msgpack.unpackb(data[_DIGEST:])
            entry = entry_of(fields["entry"])
            stages, graph = bytes(fields["stages"]), bytes(fields["graph"])
        except (OSError, ValueError, TypeError, KeyError, msgpack.UnpackException):
            return None
        compiled = replace(entry.compiled, file=writer.add("graphs", graph, suffix)) if entry.compiled else None
        return replace(entry, stages=writer.add("stages", stages, "json.z"), compiled=compiled)

    def forget(self, stamps: list[str]) -> None:
        """Removes buckets that a published artifact holds."""
        for stamp in stamps:
            self._file(stamp).unlink(missing_ok=True)

    def _file(self, stamp: str) -> Path:
        return self.directory / f"{stamp}{SUFFIX}"
