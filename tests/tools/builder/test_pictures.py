"""tools/builder/pictures.py: a build with a tower takes pictures, is proved, and its steps give what transformers gives."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import published_pictures, published_videos, tiny, towers

from npucompile.graphs.errors import ConfigError, SpecError
from npucompile.graphs.types import Bucket
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.models import vision
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.server.pictures import videos
from npucompile.server.pictures.processor import PUBLISHED
from npucompile.tools.agreement.executables import verify
from npucompile.tools.builder import plan as planning
from npucompile.tools.builder.build_all import build_all
from npucompile.tools.builder.pictures import check_served
from npucompile.tools.builder.plan import Options, Plan
from npucompile.tools.builder.rank_memory import planned_memory
from npucompile.tools.notation import EncodeSize, PrefillSize
from npucompile.tools.prove.mesh import verify_mesh

NAME = "width 72"
ENCODE = (EncodeSize(32, 2), EncodeSize(64))
FIELDS = published_pictures.FIELDS


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = towers.saved(NAME, tmp_path_factory.mktemp("tower"))
    (directory / "preprocessor_config.json").write_text(json.dumps(FIELDS))
    return directory


def planned(directory: Path, **options: Any) -> Plan:
    return tiny.planned(directory, **{"buckets": (1, 2), "prefill": (8, 32), "encode": ENCODE, **options})


def without_processor(checkpoint: Path, directory: Path) -> Path:
    shutil.copytree(checkpoint, directory)
    (directory / "preprocessor_config.json").unlink()
    return directory


def test_a_plan_with_pictures(checkpoint: Path) -> None:
    plan = planned(checkpoint)
    assert plan.buckets[:3] == (Bucket("encode", 1, 64), Bucket("encode", 2, 32), Bucket("prefill", 1, 8))
    # A prompt of 64 tokens, which is no more than a chunk of 32 between halves of pictures of 16 rows; and an encode step of 16.
    assert plan.limits.picture_rows == 1 + 64 + 16
    assert plan.pictures == PUBLISHED
    assert "pictures of up to 64 patches, 80 rows of them are kept" in plan.notes
    assert plan.model.tower.mean == plan.model.tower.std == (127.5,) * 3
    words = plan.arguments
    assert words[words.index("--encode") + 1] == "64,32x2"
    assert plan.references == (Bucket("encode", 1, 32),)


def test_sizes_that_hold_no_picture_are_refused_by_the_build(checkpoint: Path, tmp_path: Path) -> None:
    """It was built, proved and stored, and its server ended with limits of pixels that no picture has."""
    message = "--encode 64,32x2: a picture has 256 patches at least, which take 64 tokens"
    with pytest.raises(SpecError, match=message):
        check_served(planned(checkpoint))
    options = {"buckets": (1,), "prefill": (PrefillSize(8),), "backend": "eager", "encode": ENCODE, "max_model_len": 64}
    with pytest.raises(SpecError, match=message):
        build_all(str(checkpoint), options, tmp_path / "out", tmp_path, tmp_path, 1, 0)
    assert not (tmp_path / "out").exists()
    for least, sizes in ((256, (EncodeSize(256),)), (64, ENCODE)):
        directory = shutil.copytree(checkpoint, tmp_path / f"least-{least}")
        size = {**FIELDS["size"], "shortest_edge": least * 256}
        (directory / "preprocessor_config.json").write_text(json.dumps({**FIELDS, "size": size}))
        check_served(planned(directory, encode=sizes))
    # Where nobody asks, a context that holds no picture takes none.
    short = planned(checkpoint, encode=None, max_model_len=32)
    assert not any(bucket.kind == "encode" for bucket in short.buckets)
    assert any(note.startswith("no pictures: a picture has 256 patches at least") for note in short.notes)


def test_how_videos_are_prepared_is_read_or_as_published(checkpoint: Path, tmp_path: Path) -> None:
    assert planned(checkpoint).videos is None
    assert planned(without_processor(checkpoint, tmp_path / "bare")).videos == videos.PUBLISHED
    filmed = shutil.copytree(checkpoint, tmp_path / "filmed")
    (filmed / videos.FILES[0]).write_text(json.dumps(published_videos.FIELDS | {"max_frames": 9}))
    assert planned(filmed).videos == replace(videos.PUBLISHED, max_frames=9)
    (filmed / videos.FILES[0]).write_text(json.dumps(published_videos.FIELDS | {"patch_size": 8}))
    with pytest.raises(ConfigError, match="the vision tower's patch_size is 16, its processor's 8; expected the same"):
        planned(filmed)


def test_text_alone_is_the_same_with_and_without_a_tower(checkpoint: Path) -> None:
    for options in ({"encode": ()}, {"encode": None, "language_model_only": True}):
        plan = planned(checkpoint, **options)
        assert {bucket.kind for bucket in plan.buckets} == {"prefill", "decode"}
        assert (plan.pictures, plan.model.tower, plan.limits.picture_rows) == (None, None, 0)
        assert plan.arguments[plan.arguments.index("--encode") + 1] == "none"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encode": (EncodeSize(30),)}, "--encode 30: 30 has no whole rows; legal are multiples of 4 patches"),
        ({"encode": (EncodeSize(260),)}, "--encode 260: no picture fits max_model_len 64; legal are up to 256 patches"),
        ({"language_model_only": True}, "--language-model-only and --encode 64,32x2; legal is one of them"),
    ],
)
def test_what_a_tower_cannot_take_is_refused(checkpoint: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        planned(checkpoint, **options)


def test_a_model_without_a_tower_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="--encode 64,32x2: text has no vision tower; legal is none"):
        planned(tiny.write_checkpoint(tmp_path / "text"))


def test_sizes_longer_than_the_context_are_left_out(checkpoint: Path) -> None:
    plan = planned(checkpoint, encode=(EncodeSize(64), EncodeSize(512)))
    assert [bucket.q_len for bucket in plan.buckets if bucket.kind == "encode"] == [64]
    assert "no encode of 512 patches: more rows than the context of 64" in plan.notes


def test_pictures_are_prepared_as_the_checkpoint_says_or_as_published(checkpoint: Path, tmp_path: Path) -> None:
    bare = without_processor(checkpoint, tmp_path / "bare")
    plan = planned(bare)
    assert plan.pictures == PUBLISHED
    assert any("pictures are prepared as published" in note for note in plan.notes)
    (bare / "preprocessor_config.json").write_text(json.dumps(FIELDS | {"image_mean": [0.25, 0.5, 0.75]}))
    assert planned(bare).model.tower.mean == (63.75, 127.5, 191.25)
    (bare / "preprocessor_config.json").write_text(json.dumps(FIELDS | {"patch_size": 14}))
    with pytest.raises(ConfigError, match="vision tower's patch_size is 16, its processor's 14; expected the same"):
        planned(bare)


@pytest.fixture(scope="module")
def artifact(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    out = tmp_path_factory.mktemp("built") / "out"
    tiny.built(planned(checkpoint), out)
    return Artifact.open(out)


def test_the_artifact_says_how_its_pictures_are_prepared(artifact: Artifact) -> None:
    recorded = artifact.manifest.model["tower"]
    assert recorded["ids"] == towers.IDS
    assert recorded["key"] == "vision"
    assert recorded["processor"] == asdict(PUBLISHED) | {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def test_every_bucket_is_proved(artifact: Artifact) -> None:
    measured = verify(artifact, tiny.QUIET)
    assert set(measured) == {"encode-b1-q64", "encode-b2-q32", "prefill-b1-q8", "prefill-b1-q32", "decode-b1-q1", "decode-b2-q1"}
    assert all(each["rows"] > 0 and each["state_error"] < 1e-5 for each in measured.values())


def encode(executor: CpuExecutor, request: towers.Prompt) -> None:
    """Launches an encode step for each picture of a request, whose rows stand one behind the other."""
    request.rows, behind = [0] * request.count, 0
    for (_, h, w), span in zip(request.grids, request.spans, strict=True):
        bucket = next(bucket for bucket in sorted(executor.buckets) if bucket.kind == "encode" and bucket.q_len >= h * w)
        inputs: dict[str, Any] = {
            "patches": np.full((bucket.batch, bucket.q_len, 1536), 255, np.uint8),
            "grids": np.zeros((bucket.batch, 2), np.int32),
            "picture_rows": np.zeros((bucket.batch, bucket.q_len // 4), np.int32),
        }
        inputs["patches"][-1, : h * w] = towers.as_bytes(request.pixels[behind : behind + h * w])
        inputs["grids"][-1], behind = (h, w), behind + h * w
        first = max(request.rows) + 1
        rows = list(range(first, first + h * w // 4))
        inputs["picture_rows"][-1, : len(rows)] = request.rows[span.first : span.end] = rows
        assert executor.launch(bucket, [inputs]).result()[0]["finite"].all()


def test_groups_encode_their_own_pictures_and_ranks_agree_with_one_device(checkpoint: Path, tmp_path: Path) -> None:
    tiny.built(planned(checkpoint, mesh="dp=2,tp=2", buckets=(2,), prefill=(8,), max_num_seqs=2), tmp_path / "out")
    measured = verify_mesh(Artifact.open(tmp_path / "out"), tiny.QUIET)
    assert set(measured) == {"encode-b1-q64", "encode-b2-q32", "prefill-b1-q8", "decode-b2-q1"}
    assert measured["encode-b2-q32"]["rows"] > 0


def test_a_rank_has_memory_for_the_tower_and_the_pool(checkpoint: Path) -> None:
    plan, text = planned(checkpoint), planned(checkpoint, encode=())
    parts = {part.name: part.nbytes for part in planned_memory(plan).parts}
    tower = sum(tensor.nbytes for name, tensor in towers.model(NAME).state_dict().items() if ".visual." in name)
    assert parts["vision tower"] == tower
    assert parts["picture rows"] == plan.limits.picture_rows * towers.TEXT["hidden_size"] * 4
    assert {"vision tower", "picture rows"}.isdisjoint(part.name for part in planned_memory(text).parts)
    assert parts["other state"] == 0


def test_a_published_deployment_takes_pictures_where_it_is_asked_to() -> None:
    row = {"deployment": "qwen35-397b-a3x8-in3k5-out1k5-50ms", "backend": "null"}
    text, plan = (planning.plan(Options("qwen3.5-397b", **row, encode=encode)) for encode in (None, (EncodeSize(1024, 4),)))
    # A repeated build is asked for none, where one that is asked for nothing takes those of the row (answers.py).
    assert (text.limits.picture_rows, text.pictures, text.arguments[text.arguments.index("--encode") + 1]) == (0, None, "none")
    assert plan.buckets == (Bucket("encode", 4, 1024), *text.buckets)
    # Heads of 72 channels are stored as 80.
    more = 27 * (4 * 16 * 8 * 1152 + 3 * 16 * 8)
    parts = {part.name: part.nbytes for part in planned_memory(plan).parts}
    # Its recipe has layers in int8 but the second matrix of each feed-forward: a byte a weight in place of two, and a float32 an output.
    outputs, inner, hidden = 3 * 16 * 80, 4304, 1152
    weights, scales = (outputs + 16 * 80 + inner) * hidden, outputs + hidden + inner
    assert parts["vision tower"] == 2 * (456_010_480 + more) - 27 * (weights - 4 * scales)
    assert planned_memory(plan).fits


@pytest.mark.parametrize("fields", [FIELDS, FIELDS | {"image_mean": [0.481, 0.457, 0.408], "image_std": [0.268, 0.261, 0.275]}])
def test_programs_normalise_bit_for_bit_as_the_published_processor(checkpoint: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    directory = without_processor(checkpoint, tmp_path / "bare")
    (directory / "preprocessor_config.json").write_text(json.dumps(fields))
    plan, side = planned(directory), 16 * 16
    assert plan.pictures is not None
    pixels = torch.arange(3 * side * 2, dtype=torch.int64).remainder(256).to(torch.uint8).view(2, 3 * side)
    frames = pixels.view(2, 3, 1, side).expand(-1, -1, 2, -1).reshape(1, 2, -1)
    for dtype in (torch.float32, torch.bfloat16):
        made = vision.normalised(plan.model.tower, frames, dtype)
        assert torch.equal(made[0], plan.pictures.normalised(pixels).to(dtype))


def test_a_tower_that_modelslim_quantised_is_stored_as_it_is(checkpoint: Path, tmp_path: Path) -> None:
    """Layers in int8 but the second matrix of each feed-forward, as its recipe of the 397B has them."""
    shutil.copytree(checkpoint, directory := tmp_path / "int8")
    stored, kinds = dict[str, torch.Tensor](), {"model_quant_type": "W8A8_DYNAMIC"}
    for name, tensor in load_file(directory / "model.safetensors").items():
        matrix, scaled = name.removesuffix(".weight"), {name: tensor}
        if ".visual.blocks." in name and tensor.dim() == 2 and "linear_fc2" not in name:
            scale = tensor.abs().amax(1, keepdim=True) / 127
            scaled = {name: (tensor / scale).round().to(torch.int8), f"{matrix}.weight_scale": scale}
            scaled[f"{matrix}.weight_offset"] = torch.zeros_like(scale)
        stored |= scaled
        kinds |= dict.fromkeys(scaled, "W8A8_DYNAMIC" if len(scaled) > 1 else "FLOAT")
    save_file(stored, directory / "model.safetensors")
    (directory / "quant_model_description.json").write_text(json.dumps(kinds))
    tiny.built(planned(directory, prefill=(8,)), tmp_path / "out")
    artifact, request = Artifact.open(tmp_path / "out"), towers.prompt(NAME, [1, (4, 6), 1], seed=7)
    assert sum(leaf.aval.dtype == torch.int8 for leaf in artifact.manifest.params) == 3 * 2
    executor = CpuExecutor(artifact)
    encode(executor, request)
    (pool,) = (pool for leaf, pool in zip(artifact.manifest.state, executor._state, strict=True) if leaf.path == "picture_pool")
    made, wanted = pool[1:7, 0, 0], towers.rows(NAME, request.pixels, request.grids)
    assert 0 < (made - wanted).pow(2).mean().sqrt() < 0.04 * wanted.pow(2).mean().sqrt()
