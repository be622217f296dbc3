"""Formats measured rows as aligned tables, Markdown, or data for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .stats import Spread

Value = str | int | float | Spread | None


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        key: of the value in a row and in JSON; it ends with the unit.
        heading: with the unit.
        digits: after the decimal point.
    """

    key: str
    heading: str
    digits: int = 2


@dataclass(frozen=True)
class ReportTable:
    """One figure.

    Attributes:
        figure: name of its figure (tools/commands/bench.py).
        rows: values by column key; a missing value or None was not measured.
        notes: explanations printed below the table.
    """

    figure: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, Value], ...]
    notes: tuple[str, ...] = ()


def cell(value: Value, digits: int) -> str:
    """One value as text; a spread as `median (low..high)`."""
    if value is None:
        return "-"
    if isinstance(value, Spread):
        if value.count == 1:
            return cell(value.median, digits)
        return f"{value.median:,.{digits}f} ({value.low:,.{digits}f}..{value.high:,.{digits}f})"
    return f"{value:,.{digits}f}" if isinstance(value, float) else str(value)


def as_text(table: ReportTable) -> str:
    """Aligned columns, the first to the left and the others to the right."""
    grid = _grid(table)
    widths = [max(len(line[i]) for line in grid) for i in range(len(table.columns))]
    lines = []
    for first, *others in grid:
        cells = [first.ljust(widths[0]), *(text.rjust(width) for text, width in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(["", *cells]).rstrip())
    return "\n".join([table.title, "", *lines, "", *(f"  {note}" for note in table.notes)]).rstrip() + "\n"


def as_markdown(table: ReportTable) -> str:
    """A Markdown table, with the notes as a list below it."""
    grid = _grid(table)
    rule = ["---" if i == 0 else "---:" for i in range(len(table.columns))]
    lines = [f"| {' | '.join(text.replace('|', chr(92) + '|') for text in line)} |" for line in [grid[0], rule, *grid[1:]]]
    notes = ["", *(f"- {note}" for note in table.notes)] if table.notes else []
    return "\n".join([f"**{table.title}**", "", *lines, *notes]) + "\n"


def as_data(table: ReportTable) -> dict[str, Any]:
    """Plain data for JSON; a spread is an object."""
    rows = [{column.key: _plain(row.get(column.key)) for column in table.columns} for row in table.rows]
    return {"figure": table.figure, "title": table.title, "rows": rows, "notes": list(table.notes)}


def _plain(value: Value) -> Any:
    return asdict(value) if isinstance(value, Spread) else value


def _grid(table: ReportTable) -> Sequence[Sequence[str]]:
    heading = [column.heading for column in table.columns]
    return [heading, *([cell(row.get(column.key), column.digits) for column in table.columns] for row in table.rows)]
