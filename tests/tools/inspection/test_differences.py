"""tools/inspection/differences.py: equal artifacts are equal, and each kind of change is found where it is and nowhere else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support import ge_artifacts, tiny
from support import ge_bodies as gb

from npucompile.graphs.errors import SpecError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.lowering.artifact.manifest import Variable
from npucompile.lowering.ascend.link import link
from npucompile.tools.inspection.differences import differences, lines


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Graphs of two and of four layers."""
    ta = gb.loaded(tmp_path_factory.mktemp("stubs"))
    return [link(*gb.two_kinds(layers), ta) for layers in (2, 4)]


@pytest.fixture
def pair(own_artifact, tmp_path, files):
    """Two equal artifacts for NPUs; the second may be published again with changes."""
    first = ge_artifacts.published(own_artifact, files[0])
    return first, Artifact.open(tiny.copied(first.path, tmp_path / "b"))


def changed(artifact, change) -> Artifact:
    return tiny.published(artifact.path, lambda manifest, writer: change(manifest))


def test_copies_are_equal(pair):
    told = differences(*pair)
    assert (told["equal"], told["fields"], told["buckets"]) == (True, {}, {})
    (line,) = lines(told)
    assert line == f"equal: {pair[0].path} and {pair[1].path}"


def test_another_graph_shows_its_operators_launches_bytes_and_cost(pair, files):
    told = differences(pair[0], ge_artifacts.published(pair[1].path, files[1]))
    assert not told["equal"]
    assert told["fields"] == {}
    ((name, graph),) = told["buckets"].items()
    assert name == ge_artifacts.BUCKET
    assert list(graph)[:3] == ["totals", "cost", "operators"]
    assert graph["operators"]["RecurrentGatedDeltaRule"] == [1, 2]
    before, after = graph["totals"]["launches"]
    assert before < after < 2.5 * before
    assert all(a < b for a, b in (*graph["totals"].values(), graph["cost"]["step_ms"], graph["cost"]["parts_ms.launch"]))
    text = "\n".join(lines(told))
    assert f"launches  {before} -> {after}  (+{after - before})" in text
    assert "RecurrentGatedDeltaRule" in text


def test_options_and_collectives_of_a_graph(pair, files):
    changed_options = replace(files[0], options=dict(files[0].options) | {"ge.new": "1"}, engine={})
    told = differences(pair[0], ge_artifacts.published(pair[1].path, changed_options))
    graph = told["buckets"][ge_artifacts.BUCKET]
    assert graph["options"] == {"ge.new": [None, "1"]}
    assert graph["engine"] == {name: [value, None] for name, value in files[0].engine.items()}
    assert "operators" not in graph
    assert "cost" not in graph


def test_fields_of_the_manifest(pair):
    def change(manifest):
        return replace(
            manifest,
            limits=replace(manifest.limits, max_model_len=48),
            toolchain=dict(manifest.toolchain) | {"torch": "9"},
            environment={"A": Variable("1", "why")},
            platform={"chip": "ascend910_93", "cann": "9.0", "packages": []},
            checkpoint="elsewhere",
            params=tuple(param for param in manifest.params if "mixer" not in param.name),
        )

    told = differences(pair[0], changed(pair[1], change))
    before = pair[0].manifest
    assert told["fields"]["limits"] == {"max_model_len": [before.limits.max_model_len, 48]}
    assert told["fields"]["toolchain"] == {"torch": [before.toolchain["torch"], "9"]}
    assert told["fields"]["environment"] == {"A.value": [None, "1"], "A.why": [None, "why"]}
    assert told["fields"]["platform"]["cann"][1] == "9.0"
    assert told["fields"]["checkpoint"] == {"": [None, "elsewhere"]}
    gone = [param for param in before.params if "mixer" in param.name]
    assert told["fields"]["params"] == {param.name: [str(param.aval), None] for param in gone}
    assert set(told["fields"]) == {"limits", "toolchain", "environment", "platform", "checkpoint", "params"}
    assert told["buckets"][ge_artifacts.BUCKET]["cost"]["context"] == [tiny.CONTEXT // 2, 24], "equal graphs, another context"


def test_a_bucket_of_one_of_them(pair):
    other = changed(pair[1], lambda manifest: replace(manifest, graphs=manifest.graphs[1:]))
    gone = pair[0].manifest.graphs[0].bucket.name
    assert differences(pair[0], other)["buckets"] == {gone: {"only": "a"}}
    assert differences(other, pair[0])["buckets"] == {gone: {"only": "b"}}
    assert differences(pair[0], other, "4")["equal"], "of the other buckets nothing is said"
    with pytest.raises(SpecError, match=f"neither artifact has bucket '5'; they have {gone}, "):
        differences(pair[0], other, "5")


def test_equal_differences_of_layers_share_a_line():
    pairs = {f"params.layers.{i}.w": ["f32[2]", None] for i in range(3)} | {"params.layers.3.w": ["f32[2]", "f32[3]"]}
    told = {"equal": False, "a": "a", "b": "b", "buckets": {}, "fields": {"params": pairs}}
    assert [line.split() for line in lines(told)[4:]] == [
        ["params.layers.*.w", "x", "3", "f32[2]", "->", "-"],
        ["params.layers.3.w", "f32[2]", "->", "f32[3]"],
    ]
