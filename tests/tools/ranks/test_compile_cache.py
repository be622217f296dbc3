"""tools/ranks/compile_cache.py: compiled graphs of one release and chip are never found by another."""

from __future__ import annotations

import os

import pytest

from npucompile.graphs.errors import SpecError
from npucompile.tools.ranks import compile_cache
from npucompile.tools.ranks.compile_cache import cache_directory, opened

V85, V90 = "cann-8.5.0-Ascend910_9391", "cann-9.0.0-Ascend910_9391"


def test_an_artifact_without_compiled_graphs_uses_a_directory_of_the_version(tmp_path):
    directory = cache_directory(tmp_path / "artifact", tmp_path / "cache", V85)
    assert directory == tmp_path / "cache" / "ge" / V85
    assert directory != cache_directory(tmp_path / "artifact", tmp_path / "cache", V90)
    assert not directory.exists()
    assert opened(opened(directory)).is_dir(), "GE refuses a directory that does not exist"


def test_compiled_graphs_of_the_artifact_serve_their_version_alone(tmp_path):
    shipped = opened(tmp_path / "artifact" / compile_cache.SHIPPED / V85)
    assert cache_directory(tmp_path / "artifact", tmp_path / "cache", V85) == shipped
    assert cache_directory(tmp_path / "artifact", tmp_path / "cache", V90) == tmp_path / "cache" / "ge" / V90


def test_a_directory_that_cannot_be_locked_is_not_used(tmp_path, monkeypatch):
    shipped = opened(tmp_path / "artifact" / compile_cache.SHIPPED / V85)
    monkeypatch.setattr(compile_cache.os, "access", lambda path, mode: not (path == shipped and mode == os.W_OK))
    assert cache_directory(tmp_path / "artifact", tmp_path / "cache", V85) == tmp_path / "cache" / "ge" / V85


@pytest.mark.parametrize("version", ["", "..", "8.5/910", "-x", "8.5 910"])
def test_a_version_that_would_leave_the_directory_is_refused(tmp_path, version):
    with pytest.raises(SpecError, match="the version of a device is"):
        cache_directory(tmp_path, tmp_path, version)
