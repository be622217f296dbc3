"""tools/ranks/precompile.py: an artifact that was compiled on the building machine compiles nothing where it is started."""

from __future__ import annotations

import io
from contextlib import ExitStack
from dataclasses import replace

import pytest
from support import ranks, tiny

from npucompile.graphs.errors import LoweringError, SpecError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.tools.cli import Home
from npucompile.tools.commands import build
from npucompile.tools.progress import Progress
from npucompile.tools.ranks import compile_cache
from npucompile.tools.ranks import precompile as module
from npucompile.tools.ranks.executors import load_executor
from npucompile.tools.ranks.precompile import choose_devices, precompile
from npucompile.tools.ranks.rank_settings import RankSettings

pytestmark = pytest.mark.usefixtures("threads")


@pytest.mark.parametrize("mesh", ["", "tp=2"])
def test_the_first_start_finds_everything_compiled(npu_artifact, tmp_path, mesh):
    path = tiny.copied(npu_artifact(mesh), tmp_path / "artifact")
    # Compiling needs no weights.
    bare = tiny.published(path, lambda manifest, _: replace(manifest, weights=None)) if not mesh else Artifact.open(path)
    home = Home(tmp_path, ranks.environment())
    assert precompile(home, path, "emulated", tiny.QUIET) == "emulated"
    (kept,) = (path / compile_cache.SHIPPED).iterdir()
    assert len(list(kept.iterdir())) == len(bare.manifest.graphs) * (2 if mesh else 1)
    if not mesh:
        output = io.StringIO()
        with ExitStack() as stack:
            load_executor(bare, RankSettings(device="emulated", cache=tmp_path, random_weights=True), stack, Progress(output))
        assert [line.split(", ")[-2] for line in output.getvalue().splitlines()] == ["cached"] * len(bare.manifest.graphs)


def test_nothing_is_compiled_where_there_is_no_device_or_nothing_to_compile(npu_artifact, tiny_artifact, tmp_path, monkeypatch):
    assert [choose_devices(requested) for requested in ("auto", "none", "emulated", "npu")] == ["none", "none", "emulated", "npu"]
    home = Home(tmp_path, {})
    assert [precompile(home, npu_artifact(""), requested, tiny.QUIET) for requested in ("auto", "none")] == ["none", "none"]
    with pytest.raises(SpecError, match=r"--precompile emulated: .* is for cpu; legal are auto and none"):
        precompile(home, tiny_artifact, "emulated", tiny.QUIET)
    monkeypatch.setattr(module, "missing", lambda kind: None)
    assert precompile(home, tiny_artifact, "auto", tiny.QUIET) == "none"
    captured = tiny.published(
        tiny.copied(npu_artifact(""), tmp_path / "captured"), lambda manifest, _: replace(manifest, backend="aclgraph")
    )
    assert precompile(home, captured.path, "auto", tiny.QUIET) == "none"
    with pytest.raises(SpecError, match="--backend aclgraph, whose graphs no device can store; legal are auto and none"):
        precompile(home, captured.path, "emulated", tiny.QUIET)


def test_a_device_that_fails_ends_a_build_only_where_it_was_asked_for(npu_artifact, tmp_path, monkeypatch):
    def failing(*_):
        raise LoweringError("no tiling")

    monkeypatch.setattr(module, "_compile", failing)
    monkeypatch.setattr(module, "missing", lambda kind: None)
    home, output = Home(tmp_path, {}), io.StringIO()
    assert precompile(home, npu_artifact(""), "auto", Progress(output)) == "none"
    assert "the first start does it: no tiling" in output.getvalue()
    with pytest.raises(LoweringError, match="no tiling"):
        precompile(home, npu_artifact(""), "npu", tiny.QUIET)


def test_the_command_names_the_same_folder():
    assert build.SHIPPED == compile_cache.SHIPPED
