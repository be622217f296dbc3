"""tools/prove/encode.py: encode buckets of artifacts for NPUs are proved on emulated ranks, and those of this machine by test_mesh.py."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from support import tiny, towers

from npucompile.graphs.errors import VerifyError
from npucompile.graphs.types import Bucket
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.lowering.backend import backend
from npucompile.tools.agreement.tolerances import ROUNDED
from npucompile.tools.builder.plan import Options, plan
from npucompile.tools.notation import EncodeSize
from npucompile.tools.prove import encode
from npucompile.tools.prove.npu import verify_device


@pytest.mark.parametrize("mesh", ["1", pytest.param("dp=2,tp=2", marks=pytest.mark.long)])
def test_an_artifact_that_takes_pictures_is_proved(mesh: str, tmp_path: Path) -> None:
    options = {"target": "ascend-a3", "mesh": mesh, "buckets": (2,), "prefill": (16,), "max_model_len": 128, "encode": (EncodeSize(24, 2),)}
    plan = tiny.planned(towers.saved("width 72", tmp_path / "tower"), **options, dtype="auto", backend="ge", max_num_seqs=2)
    tiny.built(plan, tmp_path / "out")
    measured = verify_device(Artifact.open(tmp_path / "out"), tmp_path / "cache", tiny.QUIET, steps=2, seed=0)
    assert measured["encode-b2-q24 shipped"]["pools"] == 1
    assert measured["encode-b2-q24 small"]["rows"] > 0
    assert measured["encode-b2-q24 small"]["state_error"] < 1e-4


@pytest.mark.parametrize(
    ("model", "row", "chosen"),
    [
        ("qwen3.5-397b", "qwen35-397b-a3x8-in3k5-out1k5-50ms", "ge"),
        pytest.param("qwen3.5-397b", "qwen35-397b-a3x8-in64k-out1k-20ms", "aclgraph", marks=pytest.mark.long),
        pytest.param("qwen3.5-397b", "qwen35-397b-a3x8-mix-128k-longctx", "ge", marks=pytest.mark.long),
        pytest.param("qwen3.6-27b", "qwen36-27b-mix-tp2-dp1-262k", "aclgraph", marks=pytest.mark.long),
        pytest.param("qwen3.5-27b", "qwen35-27b-mix-tp2-dp1-133k", "ge", marks=pytest.mark.long),
    ],
)
def test_towers_of_published_rows_are_proved_in_their_formats(
    model: str, row: str, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W4A8, W8A8 and float, on all ranks of the row."""
    manifest = tiny.described(plan(Options(model, deployment=row, backend=chosen, encode=(EncodeSize(256),))))
    backend(chosen).prepare(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        measured = encode.verify_small(manifest, Bucket("encode", 2, 16), tmp_path)
        # Every dp group has two segments in one step and one or two in the other.
        assert measured["rows"] >= 3
        assert 0 < measured["state_error"] < 1e-4
        monkeypatch.setattr(encode, "ROUNDED", replace(ROUNDED, state=0.0))
        monkeypatch.setattr(encode, "SUMMED", replace(ROUNDED, state=0.0))
        with pytest.raises(VerifyError, match=r"encode-b2-q16 on mesh .* against one device: state differ by .*; legal is at most 0"):
            encode.verify_small(manifest, Bucket("encode", 2, 16), tmp_path)
