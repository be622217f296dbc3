"""lowering/backends/inductor/parts.py: a compiled body is found again by its key, unless it is damaged, and old ones make room."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from npucompile.lowering.backends.inductor import parts
from npucompile.lowering.backends.inductor.parts import CompiledParts, pack_files, unpack_files


def test_what_is_kept_is_taken_in_another_process_too(tmp_path: Path) -> None:
    CompiledParts(tmp_path / "bodies").keep("key", b"compiled")
    assert CompiledParts(tmp_path / "bodies").take("key") == b"compiled"
    assert CompiledParts(tmp_path / "bodies").take("other") is None
    assert os.listdir(tmp_path / "bodies") == ["key"]


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:-1] + b"x", lambda data: b""])
def test_a_damaged_body_is_none(tmp_path: Path, damage: object) -> None:
    kept = CompiledParts(tmp_path)
    kept.keep("key", b"compiled")
    (tmp_path / "key").write_bytes(damage((tmp_path / "key").read_bytes()))  # type: ignore[operator]
    assert kept.take("key") is None


def test_those_used_longest_ago_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = CompiledParts(tmp_path)
    for age, key in enumerate("abc"):
        kept.keep(key, b"x" * 100)
        os.utime(tmp_path / key, (1000 + age, 1000 + age))
    assert kept.take("a")
    monkeypatch.setattr(parts, "MOST_BYTES", 300)
    kept.keep("d", b"x" * 50)
    assert sorted(os.listdir(tmp_path)) == ["a", "d"]


def test_files_are_packed_in_one_order() -> None:
    files = {"b.so": b"\0b", "a.json": b"{}"}
    assert pack_files(files) == pack_files(dict(reversed(files.items())))
    assert unpack_files(pack_files(files)) == files
