"""The right to write an artifact: one process has it at a time, and it ends with that process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from ...graphs.errors import ArtifactError

PATIENCE_S = 0.1
"""How long a lock may look taken because its holder is just removing the file."""


@contextmanager
def exclusive(path: Path, what: str) -> Iterator[None]:
    """Holds a lock on the file `path`, which has the holder's process id in it and is removed afterwards.

    Args:
        path: the lock file; created here, in a directory that exists.
        what: named in the refusal.

    Raises:
        ArtifactError: when another process holds it, naming its process id.
    """
    # A lock that merely is a file, which filelock falls back to, would outlive a killed process.
    lock = FileLock(path, timeout=PATIENCE_S, poll_interval=PATIENCE_S / 10, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        holder = ""
        with suppress(FileNotFoundError):
            holder = path.read_text(encoding="ascii").strip()
        raise ArtifactError(f"{what} is being built by process {holder or 'unknown'}; wait for it, or stop it") from None
    try:
        path.write_text(f"{os.getpid()}\n", encoding="ascii")
        yield
    finally:
        # Before the release: a file that is removed after it may be the next holder's.
        path.unlink(missing_ok=True)
        lock.release()
