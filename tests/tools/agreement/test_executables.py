"""tools/agreement/executables.py: right executables pass, and wrong ones are refused by name."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from support import tiny

from npucompile.graphs.errors import ArtifactError, VerifyError
from npucompile.graphs.types import Bucket
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.lowering.artifact.graph_io import decode, encode
from npucompile.tools.agreement import alone, compare
from npucompile.tools.agreement.executables import verify
from npucompile.tools.progress import Progress

NAMES = ["prefill-b1-q4", "prefill-b1-q16", "decode-b1-q4", "decode-b2-q4", "decode-b4-q4"]


def doctored(path, name):
    """Publishes an artifact whose eager graph of one bucket is wrong while all digests are right."""

    def change(manifest, writer):
        entry = next(entry for entry in manifest.graphs if entry.bucket.name == name)
        graph = decode((path / entry.eager).read_bytes())
        node = next(node for node in graph.graph.nodes if "add_rms_norm" in str(node.target))
        node.args = tuple(0.5 if isinstance(value, float) and value < 1e-3 else value for value in node.args)
        assert 0.5 in node.args
        wrong = replace(entry, eager=writer.add("graphs", encode(graph), "graph"))
        return replace(manifest, graphs=tuple(wrong if e.bucket == entry.bucket else e for e in manifest.graphs))

    return tiny.published(path, change)


def test_every_bucket_is_measured(tiny_artifact):
    output = io.StringIO()
    buckets = verify(Artifact.open(tiny_artifact), Progress(output))
    assert list(buckets) == NAMES
    for name, measured in buckets.items():
        assert set(measured) == {"rows", "logits_error", "state_error", "token_mismatches"}
        assert measured["rows"] >= 2
        assert measured["logits_error"] <= 1e-5
        assert measured["token_mismatches"] == 0
        assert f"{name} (eager) logits within" in output.getvalue()
    # The largest bucket runs with 1, 3 and 4 live rows, each twice.
    assert buckets["decode-b4-q4"]["rows"] == 16


def test_every_count_of_accepted_drafts_is_compared_with_weights_that_are_loaded_once(tiny_artifact, monkeypatch):
    counts, loads, differences, load_weights = {}, [], compare.differences_of, Artifact.load_weights

    def noted(case, expected, *rest):
        if "counts" in expected:
            batch = len(case.operands[-1])
            counts.setdefault(batch, set()).update(int(expected["counts"][row]) for row in case.rows)
        return differences(case, expected, *rest)

    monkeypatch.setattr(alone, "differences_of", noted)
    monkeypatch.setattr(Artifact, "load_weights", lambda artifact: loads.append(artifact) or load_weights(artifact))
    verify(Artifact.open(tiny_artifact), tiny.QUIET)
    assert counts[4] == {1, 2, 3, 4}
    assert len(loads) == 1


@pytest.mark.parametrize(("error", "measured"), [(1e-3, r"logits differ by 0\.\d+"), (float("nan"), "logits differ by inf")])
def test_an_executable_that_is_wrong_is_named(own_artifact, stub, error, measured):
    artifact = tiny.with_compiled(own_artifact, "stub", ["decode-b2-q4"])
    verify(artifact, tiny.QUIET)
    stub.error = error
    with pytest.raises(
        VerifyError, match=rf"^decode-b2-q4 \(stub\) against eager rows run alone: {measured}; legal is at most 1e-05 \(6 rows"
    ):
        verify(artifact, tiny.QUIET)


def test_a_graph_whose_rows_depend_on_their_batch_is_named(own_artifact):
    """The eager graph itself is wrong, so only the bucket of one row can tell."""
    artifact = doctored(own_artifact, "decode-b4-q4")
    with pytest.raises(VerifyError, match=r"^decode-b4-q4 \(eager\) against eager rows run alone: (logits|state) differ by"):
        verify(artifact, tiny.QUIET)


def test_a_reference_that_is_not_served_is_enough(own_artifact):
    def change(manifest, _):
        single = [entry for entry in manifest.graphs if entry.bucket == Bucket("decode", 1, 4)]
        return replace(manifest, graphs=tuple(e for e in manifest.graphs if e not in single), references=tuple(single))

    tiny.published(own_artifact, change)
    artifact = doctored(own_artifact, "decode-b2-q4")
    with pytest.raises(VerifyError, match=r"decode-b2-q4 .*against eager rows run alone"):
        verify(artifact, tiny.QUIET)


def test_in_bfloat16_the_bound_is_bfloat16s(tmp_path, tiny_checkpoint):
    tiny.built(tiny.planned(tiny_checkpoint, buckets=(1, 2), prefill=(4,), dtype="bfloat16"), tmp_path / "out")
    buckets = verify(Artifact.open(tmp_path / "out"), tiny.QUIET)
    assert all(measured["logits_error"] <= 3e-2 for measured in buckets.values())


def test_there_is_nothing_to_prove_without_weights(own_artifact):
    artifact = tiny.published(own_artifact, lambda manifest, _: replace(manifest, weights=None))
    with pytest.raises(ArtifactError, match="built without weights"):
        verify(artifact, tiny.QUIET)
