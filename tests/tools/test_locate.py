"""tools/locate.py: artifacts by name, and the reasons why some are skipped."""

from __future__ import annotations

import os

import pytest
from support import tiny

from npucompile.graphs.errors import ArtifactMissing
from npucompile.lowering.artifact.artifact import MANIFEST
from npucompile.tools.locate import artifact_path, newest_runnable
from npucompile.tools.ranks.executors import settled
from npucompile.tools.ranks.rank_settings import RankSettings


def check(artifact):
    """That of `serve` and `generate`."""
    settled(artifact, RankSettings(device="auto"))


@pytest.fixture
def artifacts(tmp_path, tiny_artifact):
    """Three, the oldest first."""
    folder = tmp_path / "artifacts"
    for age, name in enumerate(("old", "middle", "new")):
        tiny.copied(tiny_artifact, folder / name)
        set_age(folder / name, age)
    return folder


def set_age(path, age):
    os.utime(path / MANIFEST, ns=(age * 10**9, age * 10**9))


def test_a_path_a_name_and_nothing(artifacts, tiny_artifact):
    assert artifact_path(artifacts, str(tiny_artifact)) == tiny_artifact
    assert artifact_path(artifacts, "middle") == artifacts / "middle"
    assert artifact_path(artifacts, None) == artifacts / "new"
    set_age(artifacts / "old", 9)
    assert artifact_path(artifacts, None) == artifacts / "old"


def test_what_is_not_there_is_named_beside_what_is(artifacts, tmp_path):
    with pytest.raises(ArtifactMissing, match=r"'nwe' is neither an artifact directory nor a built model; .*: middle, new, old"):
        artifact_path(artifacts, "nwe")
    with pytest.raises(ArtifactMissing, match=r"built under .*empty: nothing"):
        artifact_path(tmp_path / "empty", "x")
    with pytest.raises(ArtifactMissing, match=r"no artifact under .*empty; `npucompile build MODEL` makes one"):
        artifact_path(tmp_path / "empty", None)


def test_a_directory_that_is_no_artifact_is_none(artifacts, tmp_path):
    (tmp_path / "plain").mkdir()
    with pytest.raises(ArtifactMissing):
        artifact_path(artifacts, str(tmp_path / "plain"))


def test_the_newest_that_can_run_is_found_and_the_others_say_why_not(artifacts):
    artifact, skipped = newest_runnable(artifacts, check)
    assert artifact.path == artifacts / "new"
    assert skipped == []
    new, middle = artifacts / "new", artifacts / "middle"
    toolchain = {**artifact.manifest.toolchain, "torch": "1.13"}
    tiny.with_compiled(new, toolchain=toolchain)
    set_age(new, 2)
    tiny.tampered(middle / artifact.manifest.weights)
    artifact, skipped = newest_runnable(artifacts, check)
    assert artifact.path == artifacts / "old"
    assert len(skipped) == 2
    assert "torch was '1.13'" in skipped[0]
    assert artifact.manifest.weights in skipped[1]


@pytest.mark.parametrize("lacking", ["weights", "tokenizer"])
def test_what_cannot_serve_text_is_passed_over(artifacts, lacking):
    tiny.published(artifacts / "new", lambda manifest, _: tiny.replace(manifest, **{lacking: None}))
    set_age(artifacts / "new", 2)
    artifact, skipped = newest_runnable(artifacts, check)
    assert artifact.path == artifacts / "middle"
    (reason,) = skipped
    assert reason.startswith(f"{artifacts / 'new'} was built without {lacking}")


def test_where_nothing_is_built_nothing_is_found(tmp_path):
    assert newest_runnable(tmp_path / "nowhere", check) == (None, [])


def test_executables_for_a_cpu_with_more_are_not_run(artifacts):
    tiny.with_compiled(artifacts / "new", cpu_features=("avx4096",))
    set_age(artifacts / "new", 2)
    artifact, skipped = newest_runnable(artifacts, check)
    assert artifact.path == artifacts / "middle"
    assert "needs a CPU with avx4096" in skipped[0]
