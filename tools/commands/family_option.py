"""The option of every command that reads a checkpoint: a family of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click


def family_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--family`, a path or None."""
    return click.option(
        "--family",
        metavar="FILE",
        help="Python file of the model's family, where it is none of npucompile's: it ends with FAMILY = Family(...).",
    )(command)
