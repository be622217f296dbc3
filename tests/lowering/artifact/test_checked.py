"""Files that were compared with their digests: a file counts as the same only while nothing can have written to it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npucompile.lowering.artifact.checked import NAME, SETTLED_NS, Checked, now_ns
from npucompile.lowering.artifact.manifest import FileRecord

LATER = 10 * SETTLED_NS


def record(data: bytes) -> FileRecord:
    return FileRecord(hashlib.sha256(data).hexdigest(), len(data))


def remembered(directory: Path, data: bytes) -> FileRecord:
    """A file that is old enough and was compared."""
    (directory / "file").write_bytes(data)
    checked = Checked(directory)
    checked.compared("file", record(data), now_ns() + LATER)
    checked.save()
    return record(data)


CHANGES = {
    "written": lambda file: file.write_bytes(b"other"),
    "written in place": lambda file: os.pwrite(os.open(file, os.O_WRONLY), b"X", 0),
    "written, with its old time": lambda file: (
        stat := file.stat(),
        file.write_bytes(b"equal"),
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns)),
    ),
    "replaced": lambda file: (file.with_name("new").write_bytes(b"equal"), file.with_name("new").replace(file)),
    "removed": lambda file: file.unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_is_held_until_something_happens_to_it(tmp_path: Path, change: str) -> None:
    expected = remembered(tmp_path, b"bytes")
    assert Checked(tmp_path).holds("file", expected)
    CHANGES[change](tmp_path / "file")
    assert not Checked(tmp_path).holds("file", expected)


def test_another_digest_or_name_is_not_held(tmp_path: Path) -> None:
    remembered(tmp_path, b"bytes")
    assert not Checked(tmp_path).holds("file", record(b"other"))
    assert not Checked(tmp_path).holds("another", record(b"bytes"))


def test_a_file_that_has_just_been_written_is_not_remembered(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"bytes")
    checked = Checked(tmp_path)
    checked.compared("file", record(b"bytes"), now_ns())
    checked.save()
    assert not checked.holds("file", record(b"bytes"))
    assert not (tmp_path / NAME).exists()


@settings(max_examples=30, deadline=None)
@given(damage=st.binary(max_size=40))
def test_what_is_no_record_remembers_nothing(tmp_path_factory: pytest.TempPathFactory, damage: bytes) -> None:
    directory = tmp_path_factory.mktemp("artifact")
    expected = remembered(directory, b"bytes")
    (directory / NAME).write_bytes(damage)
    assert not Checked(directory).holds("file", expected)


def test_a_directory_that_cannot_be_written_loses_nothing_else(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    assert not Checked(tmp_path).holds("file", remembered(tmp_path, b"bytes"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [NAME, "file"]
