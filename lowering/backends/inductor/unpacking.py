"""Whether packages can be unpacked where torch's loader unpacks them: in the directory of $TMPDIR, or in /tmp where it is not set."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

NEEDED_BYTES = 64 * 2**20
"""Room for the libraries of packages, which stay there while they are loaded, where nobody knows how large they will be."""

_SIGNS = ("temporary directory", "failed to map segment", "No space left")
"""What torch's loader and the dynamic linker say where it is not the package's fault."""


def problem(directory: Path, needed_bytes: int = NEEDED_BYTES) -> str | None:
    """Why libraries of so many bytes cannot be loaded from a directory for temporary files; None where they can."""
    what = ""
    try:
        with tempfile.TemporaryDirectory(dir=directory):
            pass
    except OSError as error:
        what = f"nothing can be written there ({error.strerror})"
    if not what and os.statvfs(directory).f_flag & os.ST_NOEXEC:
        what = "its file system is mounted noexec"
    if not what and (free := shutil.disk_usage(directory).free) < needed_bytes:
        what = f"{free / 2**20:.0f} MiB are free there"
    if not what:
        return None
    return (
        f"TMPDIR, the directory for temporary files, is {directory}: {what}; executables are unpacked there when they are loaded, so legal "
        f"is a directory that exists, has {-(-needed_bytes // 2**20)} MiB free and is not mounted noexec"
    )


def blamed(path: Path, error: Exception) -> str | None:
    """What is wrong with the directory rather than with a package that cannot be loaded; None where it is the package."""
    if not any(sign in str(error) for sign in _SIGNS):
        return None
    return f"{path} cannot be unpacked into the directory for temporary files, which is TMPDIR, or /tmp where that is not set: {error}"
