"""tools/prove/mesh.py: ranks in one process agree with one device; wrong weights, graphs and sizes are found."""

from __future__ import annotations

import pytest
from support import tiny

from npucompile.graphs.errors import VerifyError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.tools.prove import mesh as module
from npucompile.tools.prove.mesh import verify_mesh

NAMES = ["prefill-b1-q4", "decode-b1-q4", "decode-b2-q4"]


@pytest.fixture(scope="module")
def artifact(sharded):
    return Artifact.open(sharded("dp=2,tp=2"))


def test_every_bucket_agrees_with_one_device(artifact):
    measured = verify_mesh(artifact, tiny.QUIET)
    assert list(measured) == NAMES
    for bucket in measured.values():
        assert bucket["rows"] > 0
        assert bucket["token_mismatches"] == 0
        assert 0 < bucket["logits_error"] < 1e-5
        assert 0 < bucket["state_error"] < 1e-5


def test_groups_have_different_numbers_of_requests_and_accept_drafts(artifact, monkeypatch):
    steps, right = [], module.Together
    monkeypatch.setattr(module, "Together", lambda *args: steps.append(right(*args)) or steps[-1])
    verify_mesh(artifact, tiny.QUIET)
    lives = [len(step.rows) for step in steps]
    pairs = list(zip(lives[::2], lives[1::2], strict=True))
    assert (1, 0) in pairs
    assert (2, 1) in pairs
    assert all(first != second for first, second in pairs)
    # No group has more than two rows, and every second row has a right draft.
    assert {int(row.outputs["counts"]) for step in steps for row in step.rows if "counts" in row.outputs} >= {1, 2}


def test_a_rank_with_anothers_weights_is_found(artifact, monkeypatch):
    right = module.load_shard
    monkeypatch.setattr(module, "load_shard", lambda artifact, rank: right(artifact, rank ^ 1))
    with pytest.raises(VerifyError, match=r"prefill-b1-q4 on mesh dp=2,tp=2 against one device: (logits|state) differ by"):
        verify_mesh(artifact, tiny.QUIET)


def test_a_collective_of_another_group_is_found(artifact, monkeypatch):
    right = module.decode

    def swapped(data):
        graph = right(data)
        for node in graph.graph.nodes:
            if "reduce_scatter" in str(node.target) or "all_reduce" in str(node.target):
                node.args = (*node.args[:-1], "dp")
        return graph

    monkeypatch.setattr(module, "decode", swapped)
    with pytest.raises(VerifyError, match=r"against one device: (logits|state) differ by"):
        verify_mesh(artifact, tiny.QUIET)


def test_weights_that_are_too_many_are_refused_before_they_are_read(artifact, monkeypatch):
    monkeypatch.setattr(module, "LARGEST_BYTES", 10)
    monkeypatch.setattr(module, "load_shard", lambda *args: pytest.fail("read"))
    with pytest.raises(VerifyError, match=r"\d+ bytes of weights; legal for running all ranks of dp=2,tp=2 in one process is 10"):
        verify_mesh(artifact, tiny.QUIET)
