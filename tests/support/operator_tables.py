"""Module-level tables whose entries are names of NPU operators, of which each is knowledge that stands outside of its operator's record."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

# Where names of operators belong: with their records, and in the lowerings of primitives.
HOMES = ("lowering/ascend/operators/", "graphs/ops/")
# A name that is an English word too needs a second one beside it.
FEWEST = 2


def names(root: Path) -> set[str]:
    """Names of operators in GE graphs, and of overloads and functions in torch, of which there are facts."""
    known: set[str] = set()
    for path in sorted((root / "lowering/ascend/operators/legality").glob("*.json")):
        groups = json.loads(path.read_text(encoding="utf-8"))
        known.update(name for row in (*groups["facts"], *groups["torch"]) for name in row["operators"])
    functions = {parts[1] for name in known if len(parts := name.split(".")) == 3}
    # Those of aten have names that many things have.
    return known | {name for name in functions if name.startswith("npu_")}


def tables(root: Path, paths: list[str]) -> Iterator[str]:
    """Each table as `path:line: name`."""
    known = names(root)
    for path in paths:
        if path.startswith(HOMES):
            continue
        for node in ast.parse((root / path).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value and len(_named(node.value) & known) >= FEWEST:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                yield f"{path}:{node.lineno}: {ast.unparse(target)}"


def _named(value: ast.expr) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(value):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
        elif isinstance(node, ast.Attribute):
            names |= {node.attr, ast.unparse(node).removeprefix("torch.ops.")}
    return names
