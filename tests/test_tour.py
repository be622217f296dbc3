"""docs/tour.md: what it names is defined, what it quotes is in the sources, and what it prints is what its commands print.

The README prints what its commands print too.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from support import documents, tiny

ROOT = Path(__file__).resolve().parents[1]
TOUR = (ROOT / "docs/tour.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
SERVING = ("serve", "chat")
"""Commands that are not run here: they need a server, which other tests have."""


def test_names_are_defined() -> None:
    assert list(documents.wrong_names(TOUR, ROOT)) == []


def test_quotations_are_in_the_sources() -> None:
    assert list(documents.wrong_quotations(TOUR, ROOT)) == []


def test_commands_print_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command, printed in documents.shown(TOUR):
        if command.split()[1] not in SERVING:
            assert list(documents.wrong_output(printed, output_of(command, tmp_path))) == [], command


def test_the_readme_prints_what_its_commands_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a build by the uncompiled backend, which takes seconds; what another backend numbers and measures is compared without numbers."""
    monkeypatch.chdir(tmp_path)
    (build, _), *rest = documents.shown(README)
    output_of(f"{build} --backend eager", tmp_path)
    for command, printed in rest:
        real = output_of(command, tmp_path)
        if "--stage partitioned" not in command:
            printed, real = tuple(map(unnumbered, printed)), [unnumbered(line) for line in real]
        assert list(documents.wrong_output(tuple(line for line in printed if line), [line for line in real if line])) == [], command


def output_of(command: str, cwd: Path) -> list[str]:
    """Lines that a command prints, behind its pipe where it has one."""
    call, _, pipe = command.partition(" | ")
    program, *arguments = shlex.split(call)
    assert program == "npucompile", command
    result = tiny.cli(cwd, *arguments)
    assert result.exit_code == 0, result.output
    printed = subprocess.run(pipe, shell=True, input=result.stdout, capture_output=True, text=True).stdout if pipe else result.stdout
    return [line.rstrip() for line in printed.rstrip("\n").split("\n")]


def unnumbered(line: str) -> str:
    """A line of a graph without the numbers of its values; of a table of buckets the bucket and the number of columns."""
    if line.startswith("decode-"):
        return f"{line.split()[0]} and {len(line.split())} columns"
    return re.sub(r"%\d+", "%", line)


# --- the checks catch what is wrong ---

SOURCE = """
SIZE = 1
class Record:
    field: int
    def method(self):
        return self.field
def function(x):
    return x
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "graphs").mkdir()
    (tmp_path / "graphs/a.py").write_text(SOURCE)
    return tmp_path


@pytest.mark.parametrize("name", ["SIZE", "Record", "Record.field", "Record.method", "function"])
def test_a_defined_name_is_found(root: Path, name: str) -> None:
    assert list(documents.wrong_names(f"`graphs/a.py::{name}`", root)) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("`graphs/b.py::function`", "graphs/b.py does not exist"),
        ("`graphs/a.py::functions`", "graphs/a.py does not define functions"),
        ("`graphs/a.py::Record.other`", "graphs/a.py does not define Record.other"),
        ("`graphs/a.py::method`", "graphs/a.py does not define method"),
        ("`graphs/a.py::function.x`", "graphs/a.py does not define function.x"),
    ],
)
def test_a_wrong_name_is_caught(root: Path, text: str, message: str) -> None:
    assert list(documents.wrong_names(text, root)) == [message]


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("`graphs/a.py::function`\n```python\nreturn x\n```\n", []),
        ("`graphs/a.py::function`\n```python\nreturn y\n```\n", ["graphs/a.py has no line 'return y'"]),
        ("`graphs/a.py::f` `graphs/b.py::f`\n```python\nreturn x\n```\n", ["graphs/b.py has no line 'return x'"]),
        ("```python\nreturn x\n```\n", ["no file is named before the quotation 'return x'"]),
        ("`graphs/a.py::f`\n```python\n" + "return x\n" * 4 + "```\n", ["4 lines are quoted from graphs/a.py; at most 3 are legal"]),
    ],
)
def test_a_wrong_quotation_is_caught(root: Path, text: str, messages: list[str]) -> None:
    assert list(documents.wrong_quotations(text, root)) == messages


@pytest.mark.parametrize(
    ("printed", "right"),
    [
        (("a b", "c d"), True),
        (("a ...", "c d"), True),
        (("...", "c d"), True),
        (("a b", "..."), True),
        (("a b",), False),
        (("c d",), False),
        (("a b", "c"), False),
        (("...", "c d", "e"), False),
    ],
)
def test_wrong_output_is_caught(printed: tuple[str, ...], right: bool) -> None:
    assert (list(documents.wrong_output(printed, ["a b", "c d"])) == []) is right


def test_commands_are_read_from_console_blocks() -> None:
    text = "```console\n$ npucompile models\nx\ny\n$ npucompile doctor\n```\n```json\n$ no\n```\n"
    assert list(documents.shown(text)) == [("npucompile models", ("x", "y")), ("npucompile doctor", ())]
