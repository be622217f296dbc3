"""The option of every command that reads a checkpoint: a family of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..builder.settings.model import FAMILY


def family_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--family`, a path or None."""
    return FAMILY.as_decorator()(command)
