"""Names of kinds of steps as strings in comparisons, tables and calls: each is a fact about a kind outside of its record."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

NAMES = {"decode", "encode", "prefill", "score"}
HOME = "graphs/steps/"
# What instances of a deployment do is called the same, and is no kind of step.
INSTANCES = {"phase", "phases", "role", "kv_role", "mode"}


def mentions(root: Path, paths: list[str]) -> Iterator[str]:
    """Each as `path:line: code`, in the order of the files."""
    for path in paths:
        if path.startswith(HOME):
            continue
        tree = ast.parse((root / path).read_text(encoding="utf-8"))
        lines = {node.lineno: node for node in ast.walk(tree) if isinstance(node, ast.expr) and _mentions(node)}
        yield from (f"{path}:{line}: {ast.unparse(node)[:80]}" for line, node in sorted(lines.items()))


def _mentions(node: ast.AST) -> bool:
    match node:
        case ast.Compare():
            sides = [node.left, *node.comparators]
            asked = (side.value if isinstance(side, ast.Attribute) and side.attr == "name" else side for side in sides)
            return any(map(_named, sides)) and not any(_called(side) in INSTANCES for side in asked)
        case ast.Dict():
            return _is_table(node.keys)
        case ast.Tuple() | ast.List() | ast.Set():
            return _is_table(node.elts)
        case ast.Call():
            return (_called(node.func) == "Bucket" or _called(node.func).endswith("of_kind")) and any(map(_named, node.args))
    return False


def _named(node: ast.expr) -> bool:
    """Whether it is a kind's name, or a literal that has one."""
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(map(_named, node.elts))
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in NAMES


def _is_table(entries: Sequence[ast.expr | None]) -> bool:
    """Whether several kinds have a place among these; one alone is a word for users."""
    return sum(entry is not None and _named(entry) for entry in entries) > 1


def _called(node: ast.expr) -> str:
    """The last name of `a.b`; "" of what has none."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
