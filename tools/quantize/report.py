"""The error of each quantised matrix, as a table, as JSON and as a summary."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TABLE_ROWS = 20
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_TRUNK = "model"


@dataclass(frozen=True)
class MatrixError:
    """What rounding changed of a matrix; the experts of a layer are one.

    Attributes:
        form: of models/quant/formats.py.
        relative_rms: root mean square of the changes, by that of the floats.
        worst: the largest such error of its experts; equal to `relative_rms` of any other matrix.
        float_bytes, bytes: before and after, with scales.
    """

    name: str
    form: str
    relative_rms: float
    worst: float
    float_bytes: int
    bytes: int

    @property
    def layer(self) -> int | None:
        """Number of its layer; a draft head counts its own."""
        match = _LAYER.search(self.name)
        return int(match[1]) if match else None

    @property
    def kind(self) -> str:
        """Its name without that of the layer, as in `self_attn.q_proj`, or `mtp.self_attn.q_proj` in a draft head."""
        match = _LAYER.search(self.name)
        if match is None:
            return self.name
        before, inside = self.name[: match.start()], self.name[match.end() :]
        return inside if before == _TRUNK else f"{before}.{inside}"

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints of it."""
        return {
            "name": self.name,
            "layer": self.layer,
            "format": self.form,
            "relative_rms": self.relative_rms,
            "worst": self.worst,
            "float_bytes": self.float_bytes,
            "bytes": self.bytes,
        }


class ErrorSums:
    """Sums over the parts of matrices, as they are quantised one after the other."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Any]] = {}

    def add(self, name: str, form: str, change: float, norm: float, float_bytes: int, nbytes: int) -> None:
        """Adds a part of a matrix.

        Args:
            change, norm: sums of the squares of what rounding changed, and of the floats.
            float_bytes, nbytes: before and after.
        """
        sums = self._sums.setdefault(name, [form, 0.0, 0.0, 0.0, 0, 0])
        for place, value in ((1, change), (2, norm), (4, float_bytes), (5, nbytes)):
            sums[place] += value
        sums[3] = max(sums[3], _relative(change, norm))

    def errors(self) -> list[MatrixError]:
        """Of each matrix, the worst first."""
        errors = [
            MatrixError(name, form, _relative(change, norm), worst, floats, nbytes)
            for name, (form, change, norm, worst, floats, nbytes) in self._sums.items()
        ]
        return sorted(errors, key=lambda error: -error.relative_rms)


def _relative(change: float, norm: float) -> float:
    return (change / norm) ** 0.5 if norm else 0.0


def table(errors: Sequence[MatrixError], rows: int = TABLE_ROWS) -> list[str]:
    """Lines of a table of the worst matrices."""
    if not errors:
        return []
    shown = errors[:rows]
    width = max(len("matrix"), *(len(error.name) for error in shown))
    lines = [f"{'matrix':<{width}}  {'format':<12}  error"]
    lines += [f"{error.name:<{width}}  {error.form:<12}  {error.relative_rms:.2%}" for error in shown]
    if len(errors) > rows:
        lines.append(f"and {len(errors) - rows} with smaller errors (--json lists all)")
    return lines


def summary(errors: Sequence[MatrixError]) -> list[str]:
    """A line for each format: matrices, largest error, bytes before and after."""
    counts = Counter(error.form for error in errors)
    lines = []
    for form, count in counts.items():
        own = [error for error in errors if error.form == form]
        before, after = sum(error.float_bytes for error in own), sum(error.bytes for error in own)
        lines.append(f"{form}: {count} matrices, error up to {own[0].relative_rms:.2%}, {before / 1e6:,.1f} -> {after / 1e6:,.1f} MB")
    return lines
