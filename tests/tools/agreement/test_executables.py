"""tools/agreement/executables.py: right executables pass, and wrong ones are refused by name."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from support import tiny

from npucompile.graphs.errors import ArtifactError, VerifyError
from npucompile.graphs.types import Bucket
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.lowering.artifact.graph_io import decode, encode
from npucompile.lowering.backend import open_executable
from npucompile.tools.agreement import compare
from npucompile.tools.agreement.executables import RowByRow, verify
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
    counts, loads, differences, load_weights = {}, [], compare.output_differences, Artifact.load_weights

    def noted(case, expected, *rest):
        if "counts" in expected:
            counts.setdefault(len(expected["counts"]), set()).update(expected["counts"][case.rows].tolist())
        return differences(case, expected, *rest)

    monkeypatch.setattr(compare, "output_differences", noted)
    monkeypatch.setattr(Artifact, "load_weights", lambda artifact: loads.append(artifact) or load_weights(artifact))
    verify(Artifact.open(tiny_artifact), tiny.QUIET)
    assert counts[4] == {1, 2, 3, 4}
    assert len(loads) == 1


@pytest.mark.parametrize(("error", "measured"), [(1e-3, r"logits differ by 0\.\d+"), (float("nan"), "logits differ by inf")])
def test_an_executable_that_is_wrong_is_named(own_artifact, stub, error, measured):
    artifact = tiny.with_compiled(own_artifact, "stub", ["decode-b2-q4"])
    verify(artifact, tiny.QUIET)
    stub.error = error
    with pytest.raises(VerifyError, match=rf"^decode-b2-q4 \(stub\) against the eager graph: {measured}; legal is at most 1e-05 \(6 rows"):
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


def test_row_by_row_is_the_whole_batch_one_row_at_a_time(tiny_artifact):
    artifact = Artifact.open(tiny_artifact)
    manifest = artifact.manifest
    entries = {entry.bucket.name: entry for entry in manifest.graphs}
    entry = entries["decode-b4-q4"]
    single, whole = (open_executable(tiny_artifact / entries[name].eager, "eager") for name in ("decode-b1-q4", "decode-b4-q4"))
    weights = artifact.load_weights()
    values = {
        "request_slots": [1, 0, 2, 0], "drafts": [3, 0, 1, 0], "base": [0] * 4, "logprobs": [1, 0, 0, 0],
        "page_table": [[1, 0, 0, 0], [0] * 4, [2, 0, 0, 0], [0] * 4], "state_slots_out": [[1, 2, 3, 4], [0] * 4, [5, 6, 7, 8], [0] * 4],
        "temperature": [0] * 4, "top_k": [0] * 4, "top_p": [1] * 4, "min_p": [0] * 4, "uniform": [[0] * 7] * 4,
        "bitmask_rows": [0, 0, 3, 0], "bitmask": [[[0] * 9] * 4, [[0] * 9] * 4, [[1 << 7, *[0] * 8]] * 4, [[0] * 9] * 4],
        # Without the bias and the penalty of row 0 its tokens would be others: the eighth table is for token 5.
        "bias_rows": [8, 0, 0, 0], "penalty_rows": [7, 0, 0, 0], "seen_rows": [6, 0, 0, 0], "repetition_penalty": [1.5, 1, 1, 1],
        "seen": [[[-1] * 9] * 4] * 8, "adjustments": [*[[[0] * 260] * 4] * 6, [[-9] * 3 + [0] * 257] * 4, [[0] * 5 + [99] + [0] * 254] * 4],
    }  # fmt: skip

    def operands():
        state = [torch.zeros(leaf.aval.shape, dtype=leaf.aval.dtype) for leaf in manifest.state]
        request_slots = state[[leaf.name for leaf in manifest.state].index("state.request_slots")]
        request_slots[1:3] = torch.tensor([[0, 0, 3, 4, 5, 6], [0, 0, 9, 8, 7, 6]])
        inputs = [torch.tensor(values[leaf.path], dtype=leaf.aval.dtype) for leaf in entry.inputs]
        return [*(weights[leaf.name] for leaf in manifest.params), *state, *inputs]

    ours, theirs = operands(), operands()
    first, last = len(manifest.params), len(manifest.params) + len(manifest.state)
    for actual, expected in zip(RowByRow(single, entry, artifact)(ours), whole(theirs), strict=True):
        for row in (0, 2):
            assert torch.allclose(actual[row], expected[row], atol=1e-5)
        assert actual[0].any()
        assert actual.dtype != torch.int32 or actual.shape != (4, 4) or (actual[0].tolist(), actual[2].tolist()) == ([5] * 4, [7] * 4)
        assert not actual[1].any()
        assert not actual[3].any()
    for mine, its in zip(ours[first:last], theirs[first:last], strict=True):
        # Padding writes to the null page, slot and request slot, which are not compared.
        assert torch.allclose(mine[1:], its[1:], atol=1e-5)
