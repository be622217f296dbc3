"""Published rows that take pictures, built at full size with their encode buckets: legal, and within the memory of a rank."""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import tiny

from npucompile.graphs.types import Bucket
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.lowering.ascend.ge_file import decode, parse
from npucompile.lowering.ascend.launches import launches
from npucompile.models import programs
from npucompile.tools.builder.deployments import Deployment, deployments
from npucompile.tools.builder.plan import Options, Plan, plan
from npucompile.tools.builder.pool import CompileJob, run
from npucompile.tools.builder.rank_memory import planned_memory, rank_memory
from npucompile.tools.notation import format_encode, parse_encode

ENCODE = parse_encode("256,1024,4096,16384")
"""Up to the largest picture of published processors."""


@functools.cache
def planned(row: Deployment) -> Plan:
    """With the smallest of the row's decode buckets, which leaves its limits as they are."""
    return plan(Options(row.model, deployment=row.id, buckets=row.phase().buckets[:1], encode=ENCODE))


def family(row: Deployment) -> tuple[str, int, int]:
    """What decides the shapes of a row's graphs, besides pages and slots."""
    made = planned(row)
    return str(made.mesh), made.limits.picture_rows, made.limits.max_model_len


def rows() -> list[Deployment]:
    return sorted((row for row in deployments().values() if row.pictures), key=family)


def test_ten_rows_take_pictures_in_room_that_they_have() -> None:
    assert len(rows()) == 10
    for row in rows():
        made, memory = planned(row), planned_memory(planned(row))
        parts = {part.name: part.nbytes for part in memory.parts}
        assert (memory.fits, made.quantization) == (True, "w4a8")
        # As ModelSlim's recipe has it: int8 but for a quarter of each layer, and whole on every rank.
        assert 0.6e9 < parts["vision tower"] < 0.7e9
        assert parts["picture rows"] == made.limits.picture_rows * made.model.config.hidden_size * 2
        assert not [note for note in made.notes if "text alone" in note]


@pytest.mark.parametrize(
    ("name", "integers", "floats"),
    [
        # Three matrices of each layer in int8; a layer's last one, the patches and the merger's two as floats.
        ("qwen35-397b-a3x8-in3k5-out1k5-20ms", 3 * 27, 27 + 3),
        pytest.param("qwen35-397b-a3x8-mix-128k-longctx", 4 * 27, 3, marks=pytest.mark.long),
        pytest.param("qwen36-27b-mix-tp2-dp1-262k", 4 * 27, 3, marks=pytest.mark.long),
        pytest.param("qwen35-27b-mix-tp2-dp1-133k", 0, 4 * 27 + 3, marks=pytest.mark.long),
    ],
)
def test_the_smallest_encode_bucket_is_legal_in_the_formats_of_a_row(name: str, integers: int, floats: int, tmp_path: Path) -> None:
    row = deployments()[name]
    made = plan(Options(row.model, deployment=name, encode=ENCODE))
    result = tiny.quietly(run, CompileJob(made, Bucket("encode", 1, 256), tmp_path))
    assert result.compiled is not None
    assert result.staged is not None
    assert (result.compiled.census.get("QuantBatchMatmulV3", 0), result.compiled.census["MatMul"]) == (integers, floats)
    assert result.staged.collectives == ()


def test_a_decode_step_starts_one_launch_more_for_each_draft(tmp_path: Path) -> None:
    """It makes positions of indices of tokens: in the step, and in each later pass that writes to the draft head's cache. Other passes add
    a place to each index anyhow, and it takes the place of that."""
    text = tiny.planned_device(tiny.write_checkpoint(tmp_path / "model", **tiny.NPU_SIZES), num_speculative_tokens=3)
    started = []
    for made in (text, replace(text, limits=replace(text.limits, picture_rows=33))):
        result = tiny.quietly(run, CompileJob(made, Bucket("decode", 2, 4), tmp_path))
        assert result.compiled is not None
        assert isinstance(result.compiled.data, bytes)
        started.append(Counter(op.type for op in launches(parse(decode(result.compiled.data).graph).graph[0].op)))
    assert started[1] - started[0] == Counter(Add=3)
    assert not started[0] - started[1]


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["dp=8,tp=2", "dp=4,tp=4", "dp=2,tp=8", "dp=1,tp=16"])
def test_rows_are_built_with_all_encode_buckets(mesh: str, tmp_path: Path) -> None:
    """One of each family, and the memory of every row of it by its own limits."""
    (own,) = (list(each) for (layout, *_), each in itertools.groupby(rows(), family) if layout == mesh)
    largest = max(own, key=lambda row: planned_memory(planned(row)).total_bytes)
    bucket, out = str(largest.phase().buckets[0]), tmp_path / "out"
    words = ["build", largest.model, "--deployment", largest.id, "--buckets", bucket, "--encode", format_encode(ENCODE), "--out", out]
    assert tiny.cli(tmp_path, *words, "--jobs", "1").exit_code == 0
    manifest = Artifact.open(out).manifest
    # A graph that breaks a rule of the device's operators ends a build.
    assert [entry.bucket.kind for entry in manifest.graphs] == ["encode"] * 4 + ["prefill", "decode"]
    assert all(entry.compiled for entry in manifest.graphs)
    assert sum(leaf.aval.dtype == torch.int8 for leaf in manifest.params if leaf.name.startswith("params.vision.")) == 3 * 27
    shown = json.loads(tiny.cli(tmp_path, "inspect", out, "--memory", "--json").output)
    assert shown["fits"]
    assert {"vision tower", "picture rows"} <= {part["name"] for part in shown["parts"]}
    for row in own:
        made = planned(row)
        assert rank_memory(made, programs.leaves(made.model, made.limits, made.dtype), manifest.graphs).fits, row.id
