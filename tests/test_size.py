"""Tests of tests/support/size.py, which counts lines of rooms."""

import subprocess
from collections import Counter

import pytest
from support import size


@pytest.mark.parametrize(
    "path, room",
    [
        ("graphs/ops/linear.py", "graphs"),
        ("lowering/ascend/cost/work.py", "lowering/ascend"),
        ("lowering/backend.py", "lowering"),
        ("lowering/cpp/conv.cpp", "lowering/cpp"),
        ("lowering/device_errors.json", "lowering"),
        ("models/bundled/qwen3.5-tiny/tokenizer.json", None),
        ("tools/builder/plan.py", "tools/builder"),
        ("tests/tools/test_cli.py", "tests"),
        ("docs/api.md", size.DOCS),
        ("README.md", size.DOCS),
        ("tests/golden/toy_traced.txt", None),
        ("__init__.py", None),
    ],
)
def test_a_file_has_a_room(path, room):
    assert size.room_of(path) == room


@pytest.fixture
def clone(tmp_path):
    """A repository of two commits on main, the second of which adds a line and a word."""

    def git(*arguments):
        names = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *names, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q", "-b", "main")
    for text in ("one", "one\ntwo"):
        for path in ("graphs/types.py", "README.md"):
            (tmp_path / path).parent.mkdir(exist_ok=True)
            (tmp_path / path).write_text(text)
        git("add", "-A")
        git("commit", "-q", "-m", text)
    return tmp_path, git


def test_main_is_compared_with_its_parent_and_a_branch_with_where_it_left_main(clone):
    root, git = clone
    parent, what = size.base(root)
    assert (size.at(parent, root), what) == (Counter({"graphs": 1, size.DOCS: 1}), "the parent commit")
    assert size.present(root) == Counter({"graphs": 2, size.DOCS: 2})
    git("checkout", "-q", "-b", "other")
    git("commit", "-q", "--allow-empty", "-m", "more")
    commit, what = size.base(root)
    assert (size.at(commit, root), what) == (size.present(root), "the merge base with main")


def test_the_only_commit_has_nothing_to_be_compared_with(clone):
    root, git = clone
    git("checkout", "-q", "HEAD~1")
    git("branch", "-D", "main")
    assert size.base(root)[0] == ""


def test_a_table_shows_changes():
    table = size.report(Counter({"graphs": 5, "tests": 7, size.DOCS: 9}), Counter({"graphs": 3, "models": 2, "tests": 7}))
    assert table.splitlines() == [
        "        5       +2  graphs",
        "        0       -2  models",
        "        7       +0  tests",
        "        9       +9  docs (words)",
        "        5       +0  the six folders without tools/advisor and tools/lab",
    ]
    assert size.report(Counter({"graphs": 5}), None).splitlines() == [
        "        5  graphs",
        "        5  the six folders without tools/advisor and tools/lab",
    ]
