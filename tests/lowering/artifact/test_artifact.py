"""lowering/artifact/artifact.py: an artifact is published atomically, and refused where it does not match its manifest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from npucompile.graphs.errors import ArtifactError, ArtifactMissing, ArtifactStale, ArtifactTampered
from npucompile.graphs.types import Aval, Bucket, Leaf, Limits
from npucompile.lowering.artifact.artifact import MANIFEST, Artifact, ArtifactWriter, graph_key
from npucompile.lowering.artifact.manifest import ExecutableRecord, GraphEntry, Manifest
from npucompile.lowering.toolchain import toolchain

WEIGHT = torch.arange(6, dtype=torch.float32).reshape(2, 3)


def described(writer: ArtifactWriter, *, compiled: bytes | None = None) -> Manifest:
    """A manifest of one bucket whose files are added to `writer`."""
    entry = GraphEntry(
        bucket=Bucket("decode", 2, 1),
        inputs=(),
        outputs=(),
        eager=writer.add("graphs", b"eager graph", "graph"),
        stages=writer.add("stages", b"texts", "json.z"),
        digest="key",
        compiled=ExecutableRecord("inductor", writer.add("graphs", compiled, "pt2"), "key") if compiled else None,
        cost={},
        memory={},
        collectives=(),
        verified={},
    )
    return Manifest(
        model={"name": "toy"},
        dtype="f32",
        mesh="1",
        rules={},
        target="cpu",
        backend="inductor",
        limits=Limits(16, 3, 3, 32),
        params=(Leaf("params.w", Aval((2, 3), torch.float32)),),
        state=(),
        graphs=(entry,),
        references=(),
        weights=writer.add("weights", save({"params.w": WEIGHT}), "safetensors"),
        tokenizer=writer.add("tokenizer", b"{}", "json"),
        files={},
        toolchain=toolchain(),
        cpu_features=(),
        source_digest="s",
        build_arguments=(),
    )


def publish(path: Path, *, compiled: bytes | None = None) -> Manifest:
    with ArtifactWriter(path) as writer:
        manifest = writer.publish(described(writer, compiled=compiled))
        writer.collect(manifest)
    return manifest


def interrupted(path: Path, *, publishing: bool = False) -> None:
    """A build that fails after it has added files, or after its first publish."""
    with ArtifactWriter(path) as writer:
        manifest = described(writer, compiled=b"better code")
        if publishing:
            writer.publish(manifest)
            writer.add("graphs", b"of a bucket that was refused", "pt2")
        raise ZeroDivisionError


@pytest.fixture
def built(tmp_path: Path) -> Path:
    publish(tmp_path / "made")
    return tmp_path / "made"


def contents(path: Path) -> dict[str, bytes]:
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


# --- building ---


def test_a_published_artifact_opens_and_gives_its_weights(built: Path) -> None:
    artifact = Artifact.open(built)
    assert artifact.manifest.graphs[0].backend == "eager"
    assert torch.equal(artifact.load_weights()["params.w"], WEIGHT)
    assert sorted(artifact.manifest.files) == [name for name in sorted(contents(built)) if name != MANIFEST]


def test_building_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    publish(tmp_path / "one", compiled=b"code")
    publish(tmp_path / "two", compiled=b"code")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@given(st.binary(max_size=99), st.lists(st.integers(0, 99), max_size=6), st.randoms(use_true_random=False))
def test_parts_in_any_order_are_stored_as_the_whole_is(data: bytes, cuts: list[int], random: Random) -> None:
    bounds = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    parts = [(begin, memoryview(data)[begin:end]) for begin, end in pairwise(bounds)]
    random.shuffle(parts)
    with tempfile.TemporaryDirectory() as directory, ArtifactWriter(Path(directory) / "made") as writer:
        name = writer.add_parts("weights", iter(parts), "bin")
        assert contents(writer.root) == {name: data}
        record = writer.files.pop(name)
        assert writer.add("weights", data, "bin") == name
        assert writer.files[name] == record


@pytest.mark.parametrize("parts", [[(1, b"b")], [(0, b"aa"), (1, b"b")], [(2, b"c"), (0, b"a")], [(1, b"bb"), (2, b"c"), (0, b"a")]])
def test_parts_that_leave_a_gap_or_overlap_leave_nothing(tmp_path: Path, parts: list[tuple[int, bytes]]) -> None:
    with ArtifactWriter(tmp_path / "made") as writer:
        with pytest.raises(ValueError, match="part"):
            writer.add_parts("weights", parts, "bin")
        assert contents(writer.root) == {}


def test_a_finished_build_leaves_nothing_beside_it(built: Path) -> None:
    assert [p.name for p in built.parent.iterdir()] == ["made"]


def test_a_refused_build_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        interrupted(tmp_path / "made")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_there_before_the_first_publish(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "made") as writer:
        manifest = described(writer)
        assert not (tmp_path / "made").exists()
        writer.publish(manifest)
        assert Artifact.open(tmp_path / "made").manifest.files


def test_a_refused_rebuild_leaves_what_was_there(built: Path) -> None:
    before = contents(built)
    with pytest.raises(ZeroDivisionError):
        interrupted(built)
    assert contents(built) == before


def test_a_rebuild_that_fails_after_a_publish_keeps_what_it_published(built: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        interrupted(built, publishing=True)
    artifact = Artifact.open(built)
    assert artifact.manifest.graphs[0].backend == "inductor"
    assert set(contents(built)) == {MANIFEST, *artifact.manifest.files}


def test_what_no_manifest_names_is_removed(built: Path) -> None:
    with ArtifactWriter(built) as writer:
        manifest = writer.publish(described(writer, compiled=b"better code"))
        (old,) = [name for name in manifest.files if name.endswith(".pt2")]
    publish(built, compiled=b"best code")
    assert not (built / old).exists()
    assert Artifact.open(built).manifest.graphs[0].compiled is not None


def test_files_of_equal_content_are_written_once(built: Path) -> None:
    before = {file: file.stat().st_ino for file in built.rglob("*.graph")}
    publish(built)
    assert {file: file.stat().st_ino for file in built.rglob("*.graph")} == before


def test_a_rebuild_heals_a_damaged_file(built: Path) -> None:
    damaged = next(built.rglob("*.graph"))
    damaged.write_bytes(b"eagre graph")
    publish(built)
    Artifact.open(built)


def test_a_rebuild_may_replace_an_unreadable_artifact(built: Path) -> None:
    (built / MANIFEST).write_bytes(b"\x00")
    with ArtifactWriter(built) as writer:
        assert writer.previous is None
        writer.publish(described(writer))
    Artifact.open(built)


def test_unharmed_files_are_taken_over(built: Path) -> None:
    files = Artifact.open(built).manifest.files
    (built / next(iter(files))).write_bytes(b"damaged")
    with ArtifactWriter(built) as writer:
        assert [writer.keep(name) for name in files] == [False] + [True] * (len(files) - 1)
        assert not writer.keep("graphs/never.graph")


@pytest.mark.parametrize("make", [lambda p: p.write_text("text"), lambda p: (p.mkdir(), (p / "thesis.tex").write_text("text"))])
def test_what_is_no_artifact_is_left_alone(tmp_path: Path, make: object) -> None:
    assert callable(make)
    make(tmp_path / "made")
    before = contents(tmp_path)
    with pytest.raises(ArtifactError, match="made exists and is not an artifact; legal is"):
        publish(tmp_path / "made")
    assert contents(tmp_path) == before


def test_an_empty_directory_may_become_an_artifact(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    publish(tmp_path / "made")
    Artifact.open(tmp_path / "made")


def test_two_builds_of_one_artifact_do_not_meet(built: Path) -> None:
    with ArtifactWriter(built), pytest.raises(ArtifactError, match=f"made is being built by process {os.getpid()}"):
        publish(built)
    publish(built)


def test_a_killed_build_is_cleared_away_by_the_next(tmp_path: Path) -> None:
    code = (
        "import os,sys; from pathlib import Path; from npucompile.lowering.artifact.artifact import ArtifactWriter\n"
        "w = ArtifactWriter(Path(sys.argv[1])); w.__enter__(); w.add('graphs', b'half', 'graph'); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "made")], check=False).returncode == 9
    assert not (tmp_path / "made").exists()
    publish(tmp_path / "made")
    assert [p.name for p in tmp_path.iterdir()] == ["made"]
    assert not any(data == b"half" for data in contents(tmp_path).values())


# --- reading ---


def test_there_may_be_no_artifact(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ArtifactMissing, match=f"{path} is not an artifact.*{MANIFEST}"):
            Artifact.open(path)


def damages() -> Iterator[tuple[str, str, str]]:
    for suffix in (".graph", ".json.z", ".safetensors", ".json"):
        yield suffix, "flip", "has sha256 [0-9a-f]{64}; the manifest says [0-9a-f]{64}"
        yield suffix, "cut", "has [0-9]+ bytes; the manifest says [0-9]+"
        yield suffix, "remove", "is missing"


@pytest.mark.parametrize(("suffix", "damage", "message"), list(damages()))
def test_a_damaged_file_is_refused_by_name(built: Path, suffix: str, damage: str, message: str) -> None:
    file = next(f for f in built.rglob("*") if f.name.endswith(suffix))
    data = file.read_bytes()
    if damage == "flip":
        file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "cut":
        file.write_bytes(data[:-1])
    else:
        file.unlink()
    with pytest.raises(ArtifactTampered, match=f"{file.name} {message}"):
        Artifact.open(built)
    Artifact.open(built, check=False)


def test_a_damaged_manifest_is_refused_by_name(built: Path) -> None:
    data = (built / MANIFEST).read_bytes()
    (built / MANIFEST).write_bytes(data[:-1])
    with pytest.raises(ArtifactTampered, match=str(built / MANIFEST)):
        Artifact.open(built)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"other": WEIGHT}, "holds nothing as params.w"),
        ({"params.w": WEIGHT.T.contiguous()}, r"holds \(3, 2\) torch.float32 as params.w"),
        ({"params.w": WEIGHT.half()}, r"holds \(2, 3\) torch.float16 as params.w"),
    ],
)
def test_weights_must_be_the_ones_described(tmp_path: Path, tensors: dict[str, torch.Tensor], message: str) -> None:
    with ArtifactWriter(tmp_path / "made") as writer:
        manifest = described(writer)
        writer.publish(replace(manifest, weights=writer.add("weights", save(tensors), "safetensors")))
    with pytest.raises(ArtifactTampered, match=message):
        Artifact.open(tmp_path / "made").load_weights()


def test_an_artifact_without_weights_says_so(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "made") as writer:
        writer.publish(replace(described(writer), weights=None))
    with pytest.raises(ArtifactError, match="without weights"):
        Artifact.open(tmp_path / "made").load_weights()


# --- what it was built for ---


def changed(path: Path, manifest: Manifest) -> Artifact:
    with ArtifactWriter(path) as writer:
        for name in manifest.files:
            assert writer.keep(name)
        writer.publish(manifest)
    return Artifact.open(path)


def test_what_was_built_here_runs_here(tmp_path: Path) -> None:
    publish(tmp_path / "made", compiled=b"code")
    Artifact.open(tmp_path / "made").check_runnable()


@pytest.mark.parametrize("field", ["torch", "npucompile", "machine"])
def test_a_stale_field_is_named_with_both_values(tmp_path: Path, field: str) -> None:
    manifest = publish(tmp_path / "made", compiled=b"code")
    stale = changed(tmp_path / "made", replace(manifest, toolchain={**toolchain(), field: "elder"}))
    with pytest.raises(ArtifactStale, match=re.escape(f"{field} was 'elder' and is '{toolchain()[field]}'")):
        stale.check_runnable()


def test_a_cpu_without_the_features_is_named(tmp_path: Path) -> None:
    manifest = publish(tmp_path / "made", compiled=b"code")
    with pytest.raises(ArtifactStale, match="needs a CPU with quantum"):
        changed(tmp_path / "made", replace(manifest, cpu_features=("quantum",))).check_runnable()


def test_eager_graphs_run_anywhere(built: Path) -> None:
    manifest = Artifact.open(built).manifest
    changed(built, replace(manifest, toolchain={"torch": "1.0"}, cpu_features=("quantum",))).check_runnable()


# --- a build beside a reader ---


def test_reload_sees_a_publish_once(built: Path) -> None:
    artifact = Artifact.open(built)
    assert artifact.reload() is None
    publish(built, compiled=b"code")
    newer = artifact.reload()
    assert newer is not None
    assert newer.manifest.graphs[0].backend == "inductor"
    assert newer.reload() is None


def test_reload_ignores_an_equal_manifest(built: Path) -> None:
    artifact = Artifact.open(built)
    publish(built)
    assert artifact.reload() is None


def test_reload_checks_what_is_new(built: Path) -> None:
    artifact = Artifact.open(built)
    publish(built, compiled=b"code")
    next(built.rglob("*.pt2")).write_bytes(b"c0de")
    with pytest.raises(ArtifactTampered, match="pt2 has sha256"):
        artifact.reload()


def test_a_publish_replaces_the_manifest_and_never_writes_into_it(built: Path) -> None:
    with (built / MANIFEST).open("rb") as manifest_file:
        before = (built / MANIFEST).read_bytes()
        publish(built, compiled=b"code")
        assert manifest_file.read() == before
    assert (built / MANIFEST).read_bytes() != before


# --- keys ---


def test_everything_that_decides_an_executable_is_in_its_key() -> None:
    base = ("text", "inductor", {"threads": 0, "level": "v4"}, {"torch": "2", "machine": "x"})
    assert graph_key(*base) == graph_key("text", "inductor", {"level": "v4", "threads": 0}, {"machine": "x", "torch": "2"})
    others = [
        ("text ", *base[1:]),
        (base[0], "ge", *base[2:]),
        (*base[:2], {**base[2], "threads": 1}, base[3]),
        (*base[:3], {**base[3], "torch": "3"}),
    ]
    assert len({graph_key(*base), *(graph_key(*other) for other in others)}) == 5  # type: ignore[arg-type]


def test_reading_an_artifact_loads_no_compiler() -> None:
    code = "import sys, npucompile.lowering.artifact.artifact; sys.exit('torch._inductor' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
