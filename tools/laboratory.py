"""Access to the laboratory (tools/lab), which is in the repository and not in the wheel. Nothing else in the product names it."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from ..graphs.errors import SpecError


def laboratory(module: str, command: str) -> Any:
    """A module of tools/lab, for a command that needs it.

    Raises:
        SpecError: there is no laboratory beside this package.
    """
    if importlib.util.find_spec(".lab", __package__) is None:
        raise SpecError(
            f"`npucompile {command}` needs the laboratory, which is in the repository and not in the wheel; legal is to run it from a "
            "checkout, after `pip install -e '.[test]'`"
        )
    return importlib.import_module(f".lab.{module}", __package__)
