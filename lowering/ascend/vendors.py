"""Operators that vendors have added to CANN: directories with a table of each chip's kernels, which CANN searches before its own."""

from __future__ import annotations

import json
from pathlib import Path

from ...graphs.errors import LoweringError
from ..platform import Platform
from .legality.table import FORM, table

VARIABLE = "ASCEND_CUSTOM_OPP_PATH"
"""Directories of vendors, with a colon between them."""
_TABLES = "op_impl/ai_core/tbe/config/*/aic-*-ops-info.json"


def tables(directory: Path) -> dict[str, tuple[Path, ...]]:
    """Tables of kernels in and below a directory, by chip."""
    found: dict[str, tuple[Path, ...]] = {}
    for file in sorted(directory.rglob(_TABLES)):
        found[file.parent.name] = (*found.get(file.parent.name, ()), file)
    return found


def check_kernels(package: str, directory: Path, chip: str) -> None:
    """Refuses an operator package without kernels of a chip: its operators are registered all the same, and fail when they are called.

    Args:
        directory: of the installed package.

    Raises:
        LoweringError: naming the chips that it has kernels of.
    """
    if chip not in (chips := tables(directory)):
        raise LoweringError(
            f"{package} at {directory} has kernels of {', '.join(chips) or 'no chip'}, and this machine has {chip}; install it as it is"
            " built for this chip, or build without it in --operator-packages"
        )


def check_vendors(variable: str, platform: Platform) -> None:
    """Refuses vendors that define operator types of CANN, unless graphs were built for the package that brings them.

    CANN takes such a type from the vendor: where the signatures fit, graphs would run by another contract, silently.

    Args:
        variable: value of `VARIABLE`.
        platform: what the graphs were built for.

    Raises:
        LoweringError: naming the table and the types; or a table cannot be read.
    """
    forms = [fact for fact in table().rows if fact.what == FORM]
    own = {operator for fact in forms if not fact.package for operator in fact.operators}
    asked = {operator for fact in forms if fact.package in platform.packages for operator in fact.operators}
    for directory in filter(None, variable.split(":")):
        for file in tables(Path(directory)).get(platform.chip, ()):
            try:
                operators = set(json.loads(file.read_bytes()))
            except (OSError, ValueError, TypeError) as error:
                raise LoweringError(f"{file}, on {VARIABLE}, cannot be read: {error}; take its vendor off that path") from None
            if (shadowed := operators & own) and not operators & asked:
                raise LoweringError(
                    f"{file} defines {', '.join(sorted(shadowed))}, which the graphs take from CANN, and CANN takes vendors on {VARIABLE} "
                    f"first; legal is to take that vendor off the path, or a build with its package in --operator-packages"
                )
