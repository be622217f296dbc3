"""Counts the lines of the source tree, so that growth is a decision.

Run as `python -m npucompile.tools.size`.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import click

FOLDERS = ("graphs", "models", "lowering", "runtime", "server", "tools", "tests")
BUDGET_LINES = 400

_LAYOUT = frozenset(
    (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER)
)


@dataclass(frozen=True)
class FileSize:
    """Size of one source file.

    Attributes:
        path: relative to the root, with forward slashes.
        code_lines: lines that hold code: no blank lines, comments or docstrings.
        total_lines: all lines.
    """

    path: str
    code_lines: int
    total_lines: int


def code_lines(source: str) -> int:
    """Counts the lines of Python source that hold code.

    Raises:
        SyntaxError: when the source does not parse.
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - _docstring_lines(ast.parse(source)))


def _docstring_lines(tree: ast.Module) -> set[int]:
    """Lines of every string that stands alone as a statement: docstrings and the notes under constants."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def measure(root: Path) -> list[FileSize]:
    """Sizes of the Python files in the package's folders under `root`, largest first."""
    sizes = []
    for path in (p for folder in FOLDERS for p in (root / folder).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        sizes.append(FileSize(path.relative_to(root).as_posix(), code_lines(source), len(source.splitlines())))
    return sorted(sizes, key=lambda s: (-s.code_lines, s.path))


def report(sizes: Iterable[FileSize]) -> str:
    """A table of lines per file and per folder, largest first; source files over the budget are marked."""
    files = list(sizes)
    folders: dict[str, list[FileSize]] = defaultdict(list)
    for size in files:
        folders[size.path.partition("/")[0]].append(size)
    rows = [f"{'code':>7} {'all':>7}  file"]
    rows += [_row(s.code_lines, s.total_lines, s.path + (" (over budget)" if _over_budget(s) else "")) for s in files]
    rows += ["", f"{'code':>7} {'all':>7}  folder"]
    totals = [(sum(s.code_lines for s in group), sum(s.total_lines for s in group), name, len(group)) for name, group in folders.items()]
    rows += [_row(code, total, f"{name}/ in {count} files") for code, total, name, count in sorted(totals, key=lambda t: (-t[0], t[2]))]
    summary = f"in all, {len(files)} files; budget {BUDGET_LINES} lines a source file"
    rows.append(_row(sum(t[0] for t in totals), sum(t[1] for t in totals), summary))
    return "\n".join(rows)


def _over_budget(size: FileSize) -> bool:
    return size.total_lines > BUDGET_LINES and not size.path.startswith("tests/")


def _row(code: int, total: int, name: str) -> str:
    return f"{code:>7} {total:>7}  {name}"


if __name__ == "__main__":
    click.echo(report(measure(Path(__file__).resolve().parents[1])))
