"""The vision tower against transformers' own, from checkpoints that it saved: sizes, padding, segments, formats."""

from __future__ import annotations

import functools
import importlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support import towers
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from npucompile.graphs import ops, tree
from npucompile.graphs.errors import CheckpointError, ConfigError
from npucompile.graphs.types import Tree
from npucompile.models import checkpoint, params, qwen3_5, registry, vision
from npucompile.models.quant.declare import stored
from npucompile.models.quant.description import formats_in
from npucompile.models.variant import Variant

TOWER = qwen3_5.FAMILY.tower
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
Grid = tuple[int, int, int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("towers")


def read(directory: Path) -> tuple[vision.Config, Tree]:
    """Configuration and parameters of a saved tower."""
    cfg = TOWER.read_config(json.loads((directory / "config.json").read_text()), "config.json")
    assert cfg is not None
    declared = {**registry.find(directory).model.params(torch.float32), TOWER.key: declare(cfg)}
    return cfg, checkpoint.load(checkpoint.open_checkpoint(directory), declared)[TOWER.key]


def declare(cfg: vision.Config) -> Tree:
    return stored(TOWER.abstract_params(cfg, torch.float32), cfg.variant)


@pytest.fixture(scope="module")
def own(folder: Path) -> Any:
    @functools.cache
    def of(name: str) -> tuple[vision.Config, Tree]:
        return read(towers.saved(name, folder / name))

    return of


def padded(pixels: torch.Tensor, grids: list[Grid], places: int, more: int = 0) -> dict[str, torch.Tensor]:
    """A row a segment, of NaN where there are no patches, and `more` rows without any."""
    segments = [(h, w) for t, h, w in grids for _ in range(t)]
    rows = pixels.split([h * w for h, w in segments])
    filled = torch.full((len(segments) + more, places, pixels.shape[1]), float("nan"))
    for to, row in zip(filled, rows, strict=False):
        to[: len(row)] = row
    return {"patches": filled, "grids": torch.tensor([*segments, *[(0, 0)] * more], dtype=torch.int32)}


def encoded(own: tuple[vision.Config, Tree], inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Rows of all segments, one behind the other: [all patches / 4, M]."""
    cfg, weights = own
    with torch.no_grad():
        made = TOWER.encode(cfg, weights, inputs)
    assert made.isfinite().all(), "what is in padding reached a row"
    counts = (inputs["grids"].prod(1) // cfg.merged).tolist()
    return torch.cat([segment[:count] for segment, count in zip(made, counts, strict=True)])


CASES: list[tuple[list[Grid], int, int]] = [
    ([(1, 4, 6)], 24, 0),
    ([(1, 4, 6)], 64, 2),
    ([(1, 2, 2)], 4, 0),
    ([(1, 2, 26)], 52, 1),
    ([(1, 14, 2)], 32, 0),
    ([(1, 6, 10), (1, 10, 6), (1, 2, 4)], 60, 1),
    ([(3, 4, 6), (1, 8, 8)], 64, 0),
]


@pytest.mark.parametrize("name", towers.TOWERS)
@pytest.mark.parametrize(("grids", "places", "more"), CASES)
def test_rows_are_those_of_transformers(own: Any, name: str, grids: list[Grid], places: int, more: int) -> None:
    pixels = towers.patches(name, grids, len(grids))
    torch.testing.assert_close(encoded(own(name), padded(pixels, grids, places, more)), towers.rows(name, pixels, grids), **TOLERANCE)


EVEN = st.integers(1, 12).map(lambda n: 2 * n)


@given(st.sampled_from(list(towers.TOWERS)), st.lists(st.tuples(st.integers(1, 2), EVEN, EVEN), min_size=1, max_size=3), st.integers(0, 40))
@settings(max_examples=60)
def test_any_pictures_in_any_bucket_give_the_rows_of_transformers(own: Any, name: str, grids: list[Grid], spare: int) -> None:
    pixels = towers.patches(name, grids, spare)
    places = max(h * w for _, h, w in grids) + 4 * spare
    torch.testing.assert_close(encoded(own(name), padded(pixels, grids, places, spare % 2)), towers.rows(name, pixels, grids), **TOLERANCE)


def test_a_picture_has_the_same_rows_beside_others(own: Any) -> None:
    grids = [(1, 6, 10), (1, 4, 4)]
    pixels = towers.patches("width 72", grids, 5)
    both = encoded(own("width 72"), padded(pixels, grids, 60))
    alone = encoded(own("width 72"), padded(pixels[60:], grids[1:], 60))
    torch.testing.assert_close(both[15:], alone, rtol=1e-5, atol=1e-5)


def test_bfloat16_is_near(own: Any) -> None:
    cfg, weights = own("width 72")
    grids = [(1, 6, 10)]
    pixels = towers.patches("width 72", grids, 6)
    rounded = tree.map_leaves(lambda tensor: tensor.bfloat16(), weights)
    made = encoded((cfg, rounded), {**(given := padded(pixels, grids, 64)), "patches": given["patches"].bfloat16()})
    assert made.dtype == torch.bfloat16
    wanted = towers.rows("width 72", pixels, grids)
    assert (made.float() - wanted).pow(2).mean().sqrt() < 0.03 * wanted.pow(2).mean().sqrt()


class Largest(TorchDispatchMode):
    """Most elements that a tensor had."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in pytree.tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        self.most = max([self.most, *sizes])
        return made


def test_scores_are_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    S, N, H, D = 2, 96, 3, 8
    q, k, v = (torch.randn(S, N, H, D, generator=torch.Generator().manual_seed(i)) for i in range(3))
    lengths = torch.tensor([96, 50], dtype=torch.int32)
    whole = ops.segment_attention(q, k, v, lengths, 0.3)
    monkeypatch.setattr(importlib.import_module("npucompile.graphs.ops.segment_attention"), "MOST_SCORES", 4096)
    rule = ops.segment_attention.rule("reference")
    with Largest() as seen:
        made = rule(q, k, v, lengths, 0.3)
    torch.testing.assert_close(made, whole, rtol=1e-6, atol=1e-6)
    assert seen.most < S * N * H * N // 8


@pytest.mark.parametrize("name", towers.TOWERS)
def test_heads_in_whole_tiles_give_the_same_rows(own: Any, folder: Path, name: str) -> None:
    """As NPUs have their parameters, which are written back as those of the checkpoint."""
    cfg, weights = own(name)
    wide = vision.in_tiles(cfg)
    assert wide.head_width == {"width 72": 80, "width 64": 64, "small patches": 16}[name]
    tower = stored(TOWER.abstract_params(wide, torch.float32), wide.variant)
    directory = folder / name
    text = registry.find(directory).model.params(torch.float32)
    loaded = checkpoint.load(checkpoint.open_checkpoint(directory), {**text, TOWER.key: tower})[TOWER.key]
    pixels = towers.patches(name, grids := [(1, 6, 10), (1, 8, 8)], 8)
    rows, tiled = (encoded(each, padded(pixels, grids, 64, 1)) for each in ((cfg, weights), (wide, loaded)))
    torch.testing.assert_close(tiled, rows, rtol=1e-5, atol=1e-5)
    checkpoint.save(tower, loaded, folder / f"{name} tiled")
    ours, theirs = (load_file(each / "model.safetensors") for each in (folder / f"{name} tiled", directory))
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert len(ours) == sum(key.startswith("model.visual.") for key in theirs)


# --- checkpoints ---


def test_parameters_are_those_of_the_checkpoint(folder: Path) -> None:
    directory = towers.saved("width 64", folder / "back")
    _, weights = read(directory)
    cfg = TOWER.read_config(json.loads((directory / "config.json").read_text()), "config.json")
    assert cfg is not None
    checkpoint.save(declare(cfg), weights, folder / "written")
    ours, theirs = load_file(folder / "written" / "model.safetensors"), load_file(directory / "model.safetensors")
    assert set(ours) == {name for name in theirs if name.startswith("model.visual.")}
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_sizes_of_published_towers_are_those_that_were_counted() -> None:
    ids = {name: 1 for name in towers.IDS}
    sizes = {"depth": 27, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304, "num_position_embeddings": 2304}
    rest = {"in_channels": 3, "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2, "hidden_act": "gelu_pytorch_tanh"}
    for width, count in ((4096, 456_010_480), (5120, 460_730_096)):
        values = {"text_config": {"hidden_size": width}, "vision_config": {**sizes, **rest, "out_hidden_size": width}, **ids}
        cfg = TOWER.read_config(values, "config.json")
        assert cfg is not None
        assert (cfg.head_dim, cfg.patch_dim, cfg.side) == (72, 1536, 48)
        assert sum(math.prod(param.aval.shape) for _, param in tree.flatten(declare(cfg))) == count


def test_names_without_the_first_part_are_read_too(folder: Path) -> None:
    directory = towers.saved("small patches", folder / "short")
    file = directory / "model.safetensors"
    before = read(directory)[1]
    save_file({name.replace("model.visual.", "visual."): value for name, value in load_file(file).items()}, file, {"format": "pt"})
    for (_, a), (_, b) in zip(tree.flatten(before), tree.flatten(read(directory)[1]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("merger.linear_fc1.bias", None, r"merger.linear_fc1.bias \(expected \[160\]\) is missing"),
        ("deepstack_merger_list.0.norm.weight", torch.ones(160), "deepstack_merger_list.0.norm.weight is not part of the model"),
        ("pos_embed.weight", torch.ones(25, 40), r"pos_embed.weight \(found \[25, 40\], expected \[36, 40\]\) has a wrong shape"),
    ],
)
def test_a_tower_that_does_not_fit_is_refused(folder: Path, name: str, value: torch.Tensor | None, message: str) -> None:
    directory = towers.saved("small patches", folder / "broken")
    tensors = {**load_file(directory / "model.safetensors"), f"model.visual.{name}": value}
    save_file({key: tensor for key, tensor in tensors.items() if tensor is not None}, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        read(directory)
    # A text model of the same checkpoint reads nothing of it.
    checkpoint.load(checkpoint.open_checkpoint(directory), registry.find(directory).model.params(torch.float32))


@pytest.mark.parametrize("prefix", ["model.visual.", "visual."])
def test_layers_of_int8_are_read_as_modelslim_writes_them(own: Any, folder: Path, prefix: str) -> None:
    directory = towers.in_int8(towers.saved("width 72", folder / f"int8 {prefix}"), {}, prefix)
    formats = formats_in(directory)
    assert formats is not None
    cfg, floats = own("width 72")
    variant = Variant(formats=formats)
    text = registry.find(directory).model
    declared = replace(text, config=replace(text.config, variant=variant)).params(torch.float32)
    tower = stored(TOWER.abstract_params(cfg, torch.float32), variant)
    weights = checkpoint.load(checkpoint.open_checkpoint(directory), {**declared, TOWER.key: tower})[TOWER.key]
    assert sum(leaf.dtype == torch.int8 for _, leaf in tree.flatten(weights)) == 3 * cfg.depth
    pixels = towers.patches("width 72", [(1, 6, 10)], 6)
    made, wanted = (encoded((cfg, each), padded(pixels, [(1, 6, 10)], 64)) for each in (weights, floats))
    assert 0 < (made - wanted).pow(2).mean().sqrt() < 0.03 * wanted.pow(2).mean().sqrt()
    wide = vision.in_tiles(cfg)
    tiled = stored(TOWER.abstract_params(wide, torch.float32), variant)
    loaded = checkpoint.load(checkpoint.open_checkpoint(directory), {**declared, TOWER.key: tiled})[TOWER.key]
    assert loaded["blocks"][0]["qkv"]["weight"].shape == (144, 3 * 2 * 80)
    assert loaded["blocks"][0]["qkv"]["scale"].count_nonzero() == 3 * 144
    torch.testing.assert_close(encoded((wide, loaded), padded(pixels, [(1, 6, 10)], 64)), made, rtol=1e-5, atol=1e-5)


# --- configurations ---

VALUES: dict[str, Any] = {
    "text_config": {"hidden_size": 44},
    "vision_config": {**towers.TOWERS["width 72"], "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
    | {"out_hidden_size": 44, "hidden_act": "gelu_pytorch_tanh", "deepstack_visual_indexes": [], "model_type": "qwen3_5"},
    **towers.IDS,
}


def test_a_text_model_has_no_tower() -> None:
    assert TOWER.read_config(towers.TEXT, "config.json") is None
    assert [family.name for family in registry.families() if family.tower] == ["qwen3_5"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": None}, "config.json: vision_config: depth is missing"),
        ({"hidden_act": "gelu"}, "vision_config: hidden_act is 'gelu'; supported is 'gelu_pytorch_tanh'"),
        ({"model_type": "qwen3_vl"}, "vision_config: model_type is 'qwen3_vl'; supported is"),
        ({"deepstack_visual_indexes": [8, 16]}, r"deepstack_visual_indexes is \[8, 16\]; supported is a tower without taps"),
        ({"num_heads": 5}, "hidden_size must be a multiple of num_heads"),
        ({"num_heads": 24}, "the width of a head must be a multiple of 4"),
        ({"num_position_embeddings": 48}, "num_position_embeddings must be a square"),
        ({"out_hidden_size": 45}, "out_hidden_size is 45, and the language model's hidden_size 44"),
        ({"fullatt_block_indexes": [7]}, r"vision_config: fullatt_block_indexes is \[7\], and nothing here reads it"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'; supported is 'axial' or 'default'"),
    ],
)
def test_a_tower_that_is_not_implemented_is_refused(changes: dict[str, Any], message: str) -> None:
    assert TOWER.read_config(VALUES, "config.json") is not None
    with pytest.raises(ConfigError, match=message):
        TOWER.read_config({**VALUES, "vision_config": {**VALUES["vision_config"], **changes}}, "config.json")


def test_a_checkpoint_with_a_tower_names_its_tokens() -> None:
    with pytest.raises(ConfigError, match=r"config.json: image_token_id is missing"):
        TOWER.read_config({**VALUES, "image_token_id": None}, "config.json")


def test_drawn_parameters_run() -> None:
    cfg = TOWER.read_config(VALUES, "config.json")
    assert cfg is not None
    drawn = params.initialise(declare(cfg), torch.Generator().manual_seed(1))
    pixels = torch.randn(16, cfg.patch_dim)
    assert encoded((cfg, drawn), padded(pixels, [(1, 4, 4)], 24, 1)).shape == (4, 44)
