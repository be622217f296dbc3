"""Turns a path into a right to write there that one process at a time holds, and that dies with it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...graphs.errors import ArtifactError


@contextmanager
def exclusive(path: Path, what: str) -> Iterator[None]:
    """Holds an flock on the file `path`, which is removed afterwards.

    Args:
        path: the lock file; made here, in a directory that exists.
        what: named in the refusal.

    Raises:
        ArtifactError: when another process holds it, naming its process id.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 32).decode("ascii", "replace").strip()
            os.close(handle)
            raise ArtifactError(f"{what} is being built by process {holder or 'unknown'}; wait for it, or stop it") from None
        if _is_file(handle, path):
            break
        os.close(handle)  # its holder removed it between our open and our lock: what we hold is no longer there
    try:
        os.truncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        yield
    finally:
        with suppress(FileNotFoundError):
            path.unlink()
        os.close(handle)


def _is_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
