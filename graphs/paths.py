"""Asks whether a text names a file or a directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def file_named(text: str | Path) -> Path | None:
    """The file of that name, `~` expanded; None where there is none, or the text can be no path (too long, a zero byte, `~nobody`)."""
    return _named(text, Path.is_file)


def directory_named(text: str | Path) -> Path | None:
    """The directory of that name; otherwise as `file_named`."""
    return _named(text, Path.is_dir)


def _named(text: str | Path, is_kind: Callable[[Path], bool]) -> Path | None:
    try:
        path = Path(text).expanduser()
        return path if is_kind(path) else None
    except (OSError, RuntimeError, ValueError):
        # pathlib lets through what the system says of names that are too long, and of directories that may not be searched.
        return None
