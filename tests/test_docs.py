"""README.md and docs/: every path, link, name and command in them exists; of decisions and docs/lab, links alone are read."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import documents

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HISTORY = [*sorted((ROOT / "docs/decisions").glob("*.md")), *sorted((ROOT / "docs/lab").glob("*.md"))]
MAX_DECISION_WORDS = 250
MAX_WORDS = 45_000
"""Of all documents together."""


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: file.name)
def test_what_a_document_names_exists(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    wrong = [
        *documents.wrong_paths(text, ROOT),
        *documents.wrong_names(text, ROOT),
        *documents.wrong_links(text, file),
        *documents.wrong_commands(text),
    ]
    assert wrong == []


@pytest.mark.parametrize("file", HISTORY, ids=lambda file: file.name)
def test_links_of_history_lead_somewhere(file: Path) -> None:
    assert list(documents.wrong_links(file.read_text(encoding="utf-8"), file)) == []


def test_decisions_are_short() -> None:
    words = {file.name: len(file.read_text(encoding="utf-8").split()) for file in HISTORY if file.parent.name == "decisions"}
    assert {name: count for name, count in words.items() if count > MAX_DECISION_WORDS} == {}


def test_documents_stay_small() -> None:
    assert sum(len(file.read_text(encoding="utf-8").split()) for file in [*DOCUMENTS, *HISTORY]) <= MAX_WORDS


def test_every_document_is_linked_from_the_readme() -> None:
    readme = DOCUMENTS[0].read_text(encoding="utf-8")
    assert [file.name for file in DOCUMENTS[1:] if f"(docs/{file.name})" not in readme] == []


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/a.md").write_text("# First heading\n\n## What `this` is\n")
    (tmp_path / "graphs").mkdir()
    (tmp_path / "graphs/a.py").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("`graphs/a.py`, graphs/a.py and `a.py`; `graphs/<name>.py`; elsewhere/graphs/b.py", []),
        ("`graphs/b.py`", ["graphs/b.py does not exist"]),
        ("    graphs/b.py   a line of a block", ["graphs/b.py does not exist"]),
        ("`b.py`", ["no folder has a b.py"]),
    ],
)
def test_a_wrong_path_is_caught(root: Path, text: str, messages: list[str]) -> None:
    assert list(documents.wrong_paths(text, root)) == messages


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("[a](a.md), [a](a.md#first-heading), [a](a.md#what-this-is), [web](https://example.org/b.md)", []),
        ("[b](b.md)", ["the link to b.md leads nowhere"]),
        ("[a](a.md#second)", ["a.md has no heading #second"]),
        ("[a](#second)", ["a.md has no heading #second"]),
    ],
)
def test_a_wrong_link_is_caught(root: Path, text: str, messages: list[str]) -> None:
    assert list(documents.wrong_links(text, root / "docs/a.md")) == messages


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("    $ npucompile inspect m --bucket 4 --stage lowered | tail -2   # a comment", []),
        ("`npucompile inspect ... --stage ...` and `npucompile --help`", []),
        ("    .venv/bin/npucompile chat 'a --b'   # --c", []),
        ("`npucompile inspekt m`", ["npucompile has no command 'inspekt'"]),
        ("`npucompile inspect --stages lowered`", ["npucompile inspect has no option --stages"]),
        ("    npucompile inspect --stage lowerd", ["npucompile inspect --stage takes no 'lowerd'"]),
    ],
)
def test_a_wrong_command_is_caught(text: str, messages: list[str]) -> None:
    assert list(documents.wrong_commands(text)) == messages
