"""tools/builder/cache.py: a stored bucket comes back equal, or not at all if it is damaged."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from npucompile.graphs.types import Aval, Bucket, Leaf
from npucompile.lowering.artifact.artifact import ArtifactWriter, GraphEntry
from npucompile.lowering.artifact.manifest import ExecutableRecord
from npucompile.tools.builder.cache import SUFFIX, UnfinishedBuild

STAGES, GRAPH = b"texts of stages", bytes(range(256)) * 4
ENTRY = GraphEntry(
    bucket=Bucket("decode", 4, 2),
    inputs=(Leaf("inputs.tokens", Aval((4, 2), torch.int32)),),
    outputs=(Leaf("outputs.tokens", Aval((4, 2), torch.int32)),),
    eager=None,
    stages="stages/a.json.z",
    digest="d" * 64,
    compiled=ExecutableRecord("ge", "graphs/b.ge", "d" * 64),
    cost={"flops": 10},
    memory={"peak_bytes": 7},
    collectives=(("all_reduce", "tp", "bf16[4]"),),
    verified={},
    stamp="p" * 64,
    census={"MatMul": 3},
)


@pytest.fixture
def unfinished(tmp_path):
    return UnfinishedBuild(tmp_path / "cache" / "unfinished")


@pytest.fixture
def writer(tmp_path):
    with ArtifactWriter(tmp_path / "out") as opened:
        yield opened


def test_a_bucket_comes_back_with_its_files(unfinished, writer):
    unfinished.keep(ENTRY, STAGES, GRAPH)
    entry = unfinished.take(ENTRY.stamp, writer, "ge")
    assert replace(entry, stages=ENTRY.stages, compiled=ENTRY.compiled) == ENTRY
    assert (writer.root / entry.stages).read_bytes() == STAGES
    assert (writer.root / entry.compiled.file).read_bytes() == GRAPH
    assert entry.compiled.file.endswith(".ge")
    assert {entry.stages, entry.compiled.file} == set(writer.files)


def test_a_bucket_that_nothing_was_compiled_of_has_no_graph(unfinished, writer):
    unfinished.keep(replace(ENTRY, compiled=None), STAGES, b"")
    entry = unfinished.take(ENTRY.stamp, writer, "none")
    assert entry.compiled is None
    assert list(writer.files) == [entry.stages]


def test_another_stamp_is_another_bucket(unfinished, writer):
    assert unfinished.take(ENTRY.stamp, writer, "ge") is None
    unfinished.keep(ENTRY, STAGES, GRAPH)
    assert unfinished.take("q" * 64, writer, "ge") is None
    later = replace(ENTRY, cost={"flops": 11})
    unfinished.keep(later, STAGES, GRAPH)
    assert unfinished.take(ENTRY.stamp, writer, "ge").cost == {"flops": 11}


@pytest.mark.parametrize("at", [0, 40, 0.5, -1])
@pytest.mark.parametrize("harm", ["flip", "cut"])
def test_a_harmed_bucket_does_not_come_back(unfinished, writer, at, harm):
    unfinished.keep(ENTRY, STAGES, GRAPH)
    (file,) = unfinished.directory.iterdir()
    data = bytearray(file.read_bytes())
    at = int(at * len(data)) if isinstance(at, float) else at
    if harm == "flip":
        data[at] ^= 1
    else:
        del data[at:]
    file.write_bytes(bytes(data))
    assert unfinished.take(ENTRY.stamp, writer, "ge") is None
    assert writer.files == {}


def test_a_bucket_is_there_whole_or_not_at_all(unfinished, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space"):
        unfinished.keep(ENTRY, STAGES, GRAPH)
    assert [file for file in unfinished.directory.iterdir() if file.suffix == SUFFIX] == []


def test_what_an_artifact_has_is_forgotten(unfinished, writer):
    for plan in ("a", "b", "c"):
        unfinished.keep(replace(ENTRY, stamp=plan * 64), STAGES, GRAPH)
    unfinished.forget(["a" * 64, "c" * 64, "never kept"])
    assert [file.name for file in unfinished.directory.iterdir()] == ["b" * 64 + SUFFIX]
    UnfinishedBuild(unfinished.directory / "not there").forget(["a" * 64])
