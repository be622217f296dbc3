"""Bodies compiled one by one: the files of each, kept between builds."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgpack

_DIGEST = hashlib.sha256().digest_size

MOST_BYTES = 2**30
"""Bytes of compiled bodies that are kept: several hundred of them. Beyond it those go that were used longest ago."""


class CompiledParts:
    """Compiled bodies by their key, in a directory that outlives a build.

    Args:
        directory: created when the first body is stored.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def take(self, key: str) -> bytes | None:
        """The compiled body of that key; None if there is none, or it is damaged."""
        file = self.directory / key
        try:
            data = file.read_bytes()
            os.utime(file)
        except OSError:
            return None
        return data[_DIGEST:] if hashlib.sha256(data[_DIGEST:]).digest() == data[:_DIGEST] else None

    def keep(self, key: str, data: bytes) -> None:
        """Stores a compiled body, atomically, and removes those that are too many."""
        self.directory.mkdir(parents=True, exist_ok=True)
        unfinished = self.directory / f"{key}.{os.getpid()}.part"
        unfinished.write_bytes(hashlib.sha256(data).digest() + data)
        os.replace(unfinished, self.directory / key)
        self._remove_old()

    def _remove_old(self) -> None:
        # Another process may remove the same files at the same time.
        with contextlib.suppress(FileNotFoundError):
            found = sorted(((file.stat().st_mtime_ns, file.stat().st_size, file) for file in self.directory.iterdir()), reverse=True)
            total = 0
            for _, size, file in found:
                total += size
                if total > MOST_BYTES:
                    file.unlink(missing_ok=True)


def pack_files(files: Mapping[str, bytes]) -> bytes:
    """The files of a compiled body as bytes; equal files give equal bytes."""
    packed: bytes = msgpack.packb(sorted(files.items()))
    return packed


def unpack_files(data: bytes) -> dict[str, bytes]:
    """The files that `pack_files` packed."""
    return {name: content for name, content in msgpack.unpackb(data)}
