"""lowering/artifact/lock.py: one process may build at a time; another is refused with its process id; a dead holder's lock is free."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from npucompile.graphs.errors import ArtifactError
from npucompile.lowering.artifact.lock import builder_of, exclusive, lock_of

HOLDER = """
import sys
from pathlib import Path
from npucompile.lowering.artifact.lock import exclusive
with exclusive(Path(sys.argv[1]), "thing"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_lock_leaves_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        with exclusive(tmp_path / "lock", "thing"):
            assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
        assert list(tmp_path.iterdir()) == []


def test_a_lock_is_given_back_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), exclusive(tmp_path / "lock", "thing"):
        _ = 1 // 0
    with exclusive(tmp_path / "lock", "thing"):
        pass


def test_the_second_is_refused_and_told_of_the_first(tmp_path: Path) -> None:
    with (
        exclusive(tmp_path / "lock", "the artifact"),
        pytest.raises(ArtifactError, match=f"the artifact is being built by process {os.getpid()}"),
        exclusive(tmp_path / "lock", "the artifact"),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_another_process_holds_it_until_it_dies(tmp_path: Path) -> None:
    lock = lock_of(tmp_path / "artifact")
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ArtifactError, match=f"process {holder.pid}"), exclusive(lock, "thing"):
            pass
        assert builder_of(tmp_path / "artifact") == str(holder.pid)
        holder.kill()
        holder.wait()
    assert lock.exists(), "a killed holder cannot tidy up"
    assert [builder_of(tmp_path / name) for name in ("artifact", "another")] == ["", ""]
    lock.touch()
    with exclusive(lock, "thing"):
        assert lock.read_text() == f"{os.getpid()}\n"
    assert not lock.exists()
