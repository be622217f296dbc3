"""Access to the adviser (tools/advisor), for commands. Nothing else of the core names it."""

from __future__ import annotations

import importlib
from typing import Any


def adviser(module: str) -> Any:
    """A module of tools/advisor, by its name with that of its room ("plan.views")."""
    return importlib.import_module(f".advisor.{module}", __package__)
