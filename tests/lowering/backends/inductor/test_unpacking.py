"""lowering/backends/inductor/unpacking.py: a directory that packages cannot be unpacked into is blamed, and not the package."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.backends.inductor import unpacking
from npucompile.lowering.backends.inductor.backend import PackageExecutable, package
from npucompile.tools import doctor
from npucompile.tools.builder.build_all import build_all


def gone(path: Path) -> Path:
    return path / "gone"


def noexec(path: Path) -> Path:
    return path


@pytest.mark.parametrize(
    ("place", "changed", "said"),
    [
        (gone, {}, "nothing can be written there (No such file or directory)"),
        (noexec, {"statvfs": SimpleNamespace(f_flag=os.ST_NOEXEC)}, "its file system is mounted noexec"),
        (noexec, {"disk_usage": SimpleNamespace(free=3 * 2**20)}, "3 MiB are free there"),
    ],
)
def test_a_build_is_refused_before_anything_compiles(
    tmp_path: Path, place: Callable[[Path], Path], changed: dict[str, object], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert unpacking.problem(tmp_path) is None
    for name, value in changed.items():
        monkeypatch.setattr(os if name == "statvfs" else shutil, name, lambda _, value=value: value)
    directory = place(tmp_path)
    with pytest.raises(LoweringError) as error:
        build_all("qwen3.5-tiny", {"buckets": (1,)}, tmp_path / "out", tmp_path, tmp_path, 1, 0, temporary=directory)
    assert f"TMPDIR, the directory for temporary files, is {directory}: {said}" in str(error.value)
    assert not (tmp_path / "out").exists()
    found = next(each for each in doctor.examine({"TMPDIR": str(directory)}) if each.name == "temporary files")
    assert (found.state, said in found.advice) == (doctor.MISSING, True)


def test_a_load_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch says that no directory could be made, and the dynamic linker that nothing there may be executed."""
    file = tmp_path / "x.pt2"
    file.write_bytes(package({"x.txt": b""}))
    with pytest.raises(LoweringError, match="is not a package torch"):
        PackageExecutable(file)
    assert "TMPDIR" in str(unpacking.blamed(file, OSError("x.so: failed to map segment from shared object")))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "gone"))
    with pytest.raises(LoweringError, match="which is TMPDIR, or /tmp where that is not set: Error generating temporary directory"):
        PackageExecutable(file)
