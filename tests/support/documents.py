"""Reads what documents claim of the code: names, quotations, paths and commands; each check yields what is not true."""

from __future__ import annotations

import ast
import functools
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click

from npucompile.tools.cli import COMMANDS, main

FOLDERS = ("graphs", "models", "lowering", "runtime", "server", "tools", "tests", "docs")
MAX_QUOTED_LINES = 3
LEFT_OUT = "..."

_NAMED = re.compile(r"`([\w./-]+\.py)::([\w.]+)`")
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PATH = re.compile(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})/[\w./-]*\w")
_FILE = re.compile(r"`(\w+\.py)`")
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([\w-]+))?\)")
# A line of a block, or a code span, which may be broken over two lines.
_COMMAND = re.compile(r"^(?: {4}|\$ ).*?\bnpucompile +([a-z][^\n|]*)|`npucompile\s+([a-z][^`|]*)", re.MULTILINE)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


class Shown(NamedTuple):
    """A command of a console block, and the output printed below it."""

    command: str
    output: tuple[str, ...]


def wrong_names(text: str, root: Path) -> Iterator[str]:
    """`file.py::name` where the file does not exist or does not define the name."""
    for path, name in _NAMED.findall(text):
        if not (root / path).is_file():
            yield f"{path} does not exist"
        elif not _defines(ast.parse((root / path).read_text(encoding="utf-8")).body, name.split(".")):
            yield f"{path} does not define {name}"


def wrong_quotations(text: str, root: Path) -> Iterator[str]:
    """Lines of python blocks that are not in the file named last before the block; blocks that are too long or have no file."""
    for fence in _FENCE.finditer(text):
        if fence[1] != "python":
            continue
        named = _NAMED.findall(text[: fence.start()])
        lines = [line.strip() for line in fence[2].splitlines() if line.strip()]
        if not named:
            yield f"no file is named before the quotation {lines[0]!r}"
            continue
        file = root / named[-1][0]
        source = {line.strip() for line in file.read_text(encoding="utf-8").splitlines()} if file.is_file() else set()
        yield from (f"{named[-1][0]} has no line {line!r}" for line in lines if line not in source)
        if len(lines) > MAX_QUOTED_LINES:
            yield f"{len(lines)} lines are quoted from {named[-1][0]}; at most {MAX_QUOTED_LINES} are legal"


def wrong_paths(text: str, root: Path) -> Iterator[str]:
    """Paths below the repository's folders, and files named without their folder, that do not exist."""
    yield from (f"{path} does not exist" for path in _PATH.findall(text) if not (root / path).exists())
    yield from (f"no folder has a {name}" for name in _FILE.findall(text) if not any(any((root / top).rglob(name)) for top in FOLDERS))


def wrong_links(text: str, file: Path) -> Iterator[str]:
    """Relative links to files or headings that do not exist."""
    for target, anchor in _LINK.findall(text):
        if "://" in target:
            continue
        linked = file.parent / target if target else file
        if not linked.exists():
            yield f"the link to {target} leads nowhere"
        elif anchor and anchor not in map(_anchor, _HEADING.findall(linked.read_text(encoding="utf-8"))):
            yield f"{target or file.name} has no heading #{anchor}"


def wrong_commands(text: str) -> Iterator[str]:
    """Calls of `npucompile` with a command, an option or a choice that does not exist."""
    for in_block, in_span in _COMMAND.findall(text):
        name, *words = shlex.split(in_block or in_span, comments=True)
        if words and f"{name} {words[0]}" in COMMANDS:
            name = f"{name} {words.pop(0)}"
        if name not in COMMANDS:
            yield f"npucompile has no command {name!r}"
            continue
        options = {option: param for param in _params(name) for option in param.opts}
        for word, value in itertools.pairwise([*words, ""]):
            if not word.startswith("--"):
                continue
            if word not in options:
                yield f"npucompile {name} has no option {word}"
            elif isinstance(kind := options[word].type, click.Choice) and value not in (*kind.choices, LEFT_OUT):
                yield f"npucompile {name} {word} takes no {value!r}"


def shown(text: str) -> Iterator[Shown]:
    """Commands of console blocks, in order, with the output printed for each."""
    for fence in _FENCE.finditer(text):
        if fence[1] == "console":
            for part in re.split(r"^\$ ", fence[2], flags=re.MULTILINE)[1:]:
                command, *output = part.splitlines()
                yield Shown(command, tuple(output))


def wrong_output(printed: tuple[str, ...], real: list[str]) -> Iterator[str]:
    """Lines that the real output has not, in this order; `...` alone leaves lines out, at the end of a line its rest."""
    at, gap = 0, False
    for line in printed:
        if line == LEFT_OUT:
            gap = True
            continue
        begin = line.removesuffix(LEFT_OUT) if line.endswith(LEFT_OUT) else None
        fits = [i for i, other in enumerate(real[at:], at) if (other == line if begin is None else other.startswith(begin))]
        if not fits or (not gap and fits[0] != at):
            yield f"printed is {line!r}; real is {real[at] if at < len(real) else 'the end'!r}"
            return
        at, gap = fits[0] + 1, False
    if at < len(real) and not gap:
        yield f"the output goes on with {real[at]!r}"


def _defines(body: list[ast.stmt], names: list[str]) -> bool:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == names[0]:
            return len(names) == 1 or (isinstance(node, ast.ClassDef) and _defines(node.body, names[1:]))
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if len(names) == 1 and any(isinstance(target, ast.Name) and target.id == names[0] for target in targets):
            return True
    return False


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@functools.cache
def _params(name: str) -> tuple[click.Parameter, ...]:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    return (*command.params, *main.params, click.Option(["--help"]))
