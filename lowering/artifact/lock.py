"""The lock of an artifact: one process may write it at a time, and the lock ends with that process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from ...graphs.errors import ArtifactError

RETRY_S = 0.1
"""Time to retry for: a lock may look taken while its last holder is removing the file."""


def lock_of(artifact: Path) -> Path:
    """The lock file of an artifact."""
    return artifact.with_name(f".{artifact.name}.lock")


def builder_of(artifact: Path) -> str:
    """The process that writes an artifact; empty where none does."""
    lock = lock_of(artifact)
    # One that nobody may write to has no writer either.
    with suppress(FileNotFoundError, PermissionError):
        holder = lock.read_text(encoding="ascii").strip()
        try:
            with exclusive(lock, str(artifact)):
                return ""
        except ArtifactError:
            return holder
    return ""


@contextmanager
def exclusive(path: Path, what: str) -> Iterator[None]:
    """Holds a lock on the file `path`, which contains the holder's process id and is removed afterwards.

    Args:
        path: the lock file; created here, in a directory that exists.
        what: name of the locked thing in the error.

    Raises:
        ArtifactError: when another process holds the lock, naming its process id.
    """
    # filelock's fallback, where the file's existence is the lock, would outlive a killed process.
    lock = FileLock(path, timeout=RETRY_S, poll_interval=RETRY_S / 10, fallback_to_soft=False)
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
        # Removed before the release: afterwards the file may be the next holder's.
        path.unlink(missing_ok=True)
        lock.release()
