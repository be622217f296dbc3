"""tools/prove/encode.py: encode buckets of artifacts for NPUs are proved on emulated ranks, and those of this machine by test_mesh.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import tiny, towers

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.tools.notation import EncodeSize
from npucompile.tools.prove.npu import verify_device


@pytest.mark.parametrize("mesh", ["1", pytest.param("dp=2,tp=2", marks=pytest.mark.long)])
def test_an_artifact_that_takes_pictures_is_proved(mesh: str, tmp_path: Path) -> None:
    options = {"target": "ascend-a3", "mesh": mesh, "buckets": (2,), "prefill": (16,), "max_model_len": 128, "encode": (EncodeSize(24, 2),)}
    plan = tiny.planned(towers.saved("width 72", tmp_path / "tower"), **options, dtype="auto", backend="ge", max_num_seqs=2)
    tiny.built(plan, tmp_path / "out")
    measured = verify_device(Artifact.open(tmp_path / "out"), tmp_path / "cache", tiny.QUIET, steps=2, seed=0)
    assert measured["encode-b2-q24 shipped"]["pools"] == 1
    assert measured["encode-b2-q24 small"]["rows"] > 0
    assert 0 < measured["encode-b2-q24 small"]["state_error"] < 1e-4
