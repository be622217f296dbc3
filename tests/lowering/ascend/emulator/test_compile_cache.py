"""lowering/ascend/emulator/compile_cache.py: a graph is found by its key, and a key that says too little is found out."""

from __future__ import annotations

from pathlib import Path

import pytest

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend.emulator.compile_cache import DIRECTORY, KEY, compiled


def test_the_second_time_it_is_there(tmp_path: Path) -> None:
    options = {DIRECTORY: str(tmp_path), KEY: "abc"}
    assert not compiled(options, "1", b"graph", [2, 29])
    assert compiled(options, "1", b"graph", [2, 29])
    assert [path.name for path in tmp_path.iterdir()] == ["abc.idx"]
    assert not compiled(options | {KEY: "def"}, "1", b"graph", [2, 29])


@pytest.mark.parametrize(
    ("version", "graph", "formats", "named"),
    [
        ("1", b"other", [2], "graph differ"),
        ("1", b"graph", [29], r"formats differ, found \[\[2\]\], compiled \[\[29\]\]"),
        ("2", b"graph", [2], "version"),
    ],
)
def test_another_graph_under_the_same_key_is_refused(tmp_path: Path, version: str, graph: bytes, formats: list[int], named: str) -> None:
    options = {DIRECTORY: str(tmp_path), KEY: "abc"}
    compiled(options, "1", b"graph", [2])
    with pytest.raises(LoweringError, match=f"cached under the same key abc in .*{named}"):
        compiled(options, version, graph, formats)


def test_without_a_directory_nothing_is_kept(tmp_path: Path) -> None:
    assert not compiled({}, "1", b"graph", [2])
    for options in ({DIRECTORY: str(tmp_path / "nowhere"), KEY: "abc"}, {DIRECTORY: str(tmp_path)}):
        with pytest.raises(LoweringError, match="legal are an existing directory and a key"):
            compiled(options, "1", b"graph", [2])
