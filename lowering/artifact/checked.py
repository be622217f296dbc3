"""Which files of an artifact were compared with their digests, so that those that have not changed since are not read again.

As in the index of git, a file is known by what the file system says of it: its size, times and inode. Nobody but root can set the time of
the last change (ctime), and whatever writes to a file changes it.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgpack

from .manifest import FileRecord

NAME = ".checked"
"""File in the artifact's directory. Whoever could forge it could forge the manifest."""

SETTLED_NS = 2_000_000_000
"""Age from which a file's times tell that it has not changed: clocks of file systems are coarse, and two writes may get one time."""

Stat = tuple[int, int, int, int]
"""Size, times of the last modification and of the last change, inode."""


class Checked:
    """The files that were compared.

    Args:
        directory: of an artifact. What it remembers is lost where it cannot be written, and then files are read every time.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[str, tuple[str, Stat]] = {}
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, msgpack.UnpackException):
            found = msgpack.unpackb((directory / NAME).read_bytes())
            self._known = {str(name): (digest, tuple(stat)) for name, (digest, stat) in found.items()}
        self._changed = False

    def holds(self, name: str, record: FileRecord) -> bool:
        """Whether this file had this digest when it was read last, and has not changed since."""
        return self._known.get(name) == (record.sha256, _stat(self._directory / name))

    def compared(self, name: str, record: FileRecord, began_ns: int) -> None:
        """Remembers that a file has its digest.

        Args:
            began_ns: `time.time_ns` before it was read.
        """
        stat = _stat(self._directory / name)
        if stat is not None and max(stat[1], stat[2]) < began_ns - SETTLED_NS:
            self._known[name], self._changed = (record.sha256, stat), True

    def save(self) -> None:
        """Writes what is new, atomically; of two processes that do so at once, one wins."""
        if not self._changed:
            return
        unfinished = self._directory / f"{NAME}.{os.getpid()}.part"
        try:
            unfinished.write_bytes(msgpack.packb(self._known))
            unfinished.replace(self._directory / NAME)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)


def now_ns() -> int:
    """The time by the clock that files' times are taken from."""
    return time.time_ns()


def _stat(file: Path) -> Stat | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
