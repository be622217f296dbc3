"""tools/sources.py: the digest is of names and contents of everything that decides a graph, and of nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import npucompile
from npucompile.tools.build import source_digest


@pytest.fixture
def package(tmp_path):
    """A package of few files."""
    for part in source_digest.PARTS:
        file = tmp_path / (part if part.endswith(".py") else f"{part}/inner/one.py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x = 1\n")
    (tmp_path / "tools" / "cmd_build.py").write_text("y = 1\n")
    (tmp_path / "graphs" / "notes.txt").write_text("z")
    return tmp_path


def digest(root):
    source_digest.digest.cache_clear()
    return source_digest.digest(root)


@pytest.mark.parametrize("part", source_digest.PARTS)
def test_a_change_of_any_part_changes_it(package, part):
    before = digest(package)
    file = package / part if part.endswith(".py") else package / part / "inner" / "one.py"
    file.write_text("x = 2\n")
    after = digest(package)
    assert after != before
    file.write_text("x = 1\n")
    assert digest(package) == before


def test_names_count_as_contents_do(package):
    before = digest(package)
    (package / "graphs" / "inner" / "one.py").rename(package / "graphs" / "inner" / "two.py")
    moved = digest(package)
    (package / "graphs" / "inner" / "two.py").rename(package / "lowering" / "inner" / "two.py")
    again = digest(package)
    (package / "models" / "new.py").write_text("")
    assert len({before, moved, again, digest(package)}) == 4


def test_what_decides_no_graph_does_not_count(package):
    before = digest(package)
    (package / "tools" / "cmd_build.py").write_text("y = 2\n")
    (package / "graphs" / "notes.txt").write_text("other")
    (package / "graphs" / "__pycache__").mkdir()
    (package / "graphs" / "__pycache__" / "one.pyc").write_bytes(b"other")
    assert digest(package) == before


def test_it_is_the_same_wherever_the_package_is(package, tmp_path_factory):
    other = tmp_path_factory.mktemp("other") / "place"
    shutil.copytree(package, other)
    assert digest(other) == digest(package)


def test_its_own_package_is_read_once():
    root = Path(npucompile.__file__).parent
    assert root == source_digest.ROOT
    assert all((root / part).exists() for part in source_digest.PARTS)
    source_digest.digest.cache_clear()
    assert source_digest.digest() == source_digest.digest()
    assert source_digest.digest.cache_info().misses == 1
    assert len(source_digest.digest()) == 64
