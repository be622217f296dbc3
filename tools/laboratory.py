"""Access to the laboratory (tools/lab), which is in the repository and not in the wheel. Nothing else in the product names it."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from ..graphs.errors import SpecError


def missing(command: str) -> str:
    """Why a command that needs the laboratory is refused; "" where it is there."""
    if importlib.util.find_spec(".lab", __package__) is not None:
        return ""
    return (
        f"`npucompile {command}` needs the laboratory, which is in the repository and not in the wheel; legal is to run it from a "
        "checkout, after `pip install -e '.[test]'`"
    )


def laboratory(module: str, command: str = "bench") -> Any:
    """A module of tools/lab, for a command that needs it.

    Raises:
        SpecError: there is no laboratory beside this package.
    """
    if reason := missing(command):
        raise SpecError(reason)
    return importlib.import_module(f".lab.{module}", __package__)
