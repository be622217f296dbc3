"""Directories of vendors, as CANN's operator projects install them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path


def put_vendor(directory: Path, chip: str, operators: Iterable[str]) -> Path:
    """Writes the table of a vendor's kernels for a chip; returns its path."""
    file = directory / "op_impl" / "ai_core" / "tbe" / "config" / chip / f"aic-{chip}-ops-info.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({operator: {"opFile": {"value": operator.lower()}} for operator in operators}))
    return file
