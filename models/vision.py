"""The vision tower of Qwen3.5 and 3.6: patches of pictures -> rows that stand in the places of tokens' embeddings.

A transformer whose attention is whole inside a segment, which is one picture or one pair of frames, and ends there; learned positions are
stretched over the picture, and each head is rotated by rows and by columns. Four neighbouring patches become one row. Source of the
architecture: transformers 5.23, models/qwen3_5/modeling_qwen3_5.py, Qwen3_5VisionModel.

Its parameters are whole on every device: int8 they are half a gigabyte, and ranks that share pictures need no sum in each of its layers,
where ranks that share its heads need two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..graphs import ops
from ..graphs.errors import ConfigError
from ..graphs.ir.block import block
from ..graphs.types import Aval, Tree
from . import quant
from .config import PICTURE_TOKENS, Fields
from .config_fields import WITHOUT_EFFECT
from .family import Tower
from .head_padding import PaddedHeads, with_real_sources
from .params import Param, Parts, Source, SourceAxis, norm
from .variant import PLAIN, Variant

PREFIX = "model.visual."
"""Begins the names of its tensors in a checkpoint."""

EPS = 1e-6
"""Of every norm; no file says it."""

THETA = 1e4
"""Base of the rotation where a file does not say it."""

_CHANNELS = "channels of a head"
"""Kind of what is padded, for sources of parameters."""

_TILE = 8
"""Channels of half a tile of NPUs' matrix unit."""

_SIZES = (
    *("depth", "hidden_size", "intermediate_size", "num_heads", "out_hidden_size", "num_position_embeddings"),
    *("in_channels", "patch_size", "temporal_patch_size", "spatial_merge_size"),
)
_TYPES = ("qwen3_5", "qwen3_5_moe", "qwen3_5_vision", "qwen3_5_moe_vision")


@dataclass(frozen=True)
class Config:
    """Sizes of a tower; names are those of `vision_config`, and of the ids beside it.

    Attributes:
        out_hidden_size: width of the language model.
        num_position_embeddings: of the square table of learned positions.
        spatial_merge_size: patches of a row of the result are a square of this side.
        stored_width: channels that each head is stored with, zeros behind those of each half of it (`in_tiles`); 0: those that it has.
        mean, std: of the bytes of each channel, as published unless a checkpoint's file says something else (`prepared`).
        image_token_id: stands in a prompt for each row of a picture, between `vision_start_token_id` and `vision_end_token_id`.
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    num_position_embeddings: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    rope_theta: float
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    mean: tuple[float, ...] = (127.5,) * 3
    std: tuple[float, ...] = (127.5,) * 3
    variant: Variant = PLAIN
    stored_width: int = 0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def head_width(self) -> int:
        """Channels of a head as it is stored."""
        return self.stored_width or self.head_dim

    @property
    def side(self) -> int:
        """Positions along each side of the table."""
        return math.isqrt(self.num_position_embeddings)

    @property
    def patch_dim(self) -> int:
        """Values of a patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merged(self) -> int:
        """Patches of a row of the result."""
        return self.spatial_merge_size**2

    def __post_init__(self) -> None:
        checks = (
            (self.hidden_size % self.num_heads, "hidden_size must be a multiple of num_heads"),
            (self.head_dim % 4, "the width of a head must be a multiple of 4: half of it turns by rows, half by columns"),
            (self.side**2 != self.num_position_embeddings, "num_position_embeddings must be a square"),
            (not len(self.mean) == len(self.std) == self.in_channels, "each of in_channels needs a mean and a standard deviation"),
        )
        for broken, rule in checks:
            if broken:
                raise ConfigError(f"vision_config: {rule}; the configuration is {self}")


def read_config(values: Mapping[str, Any], where: str = "config.json") -> Config | None:
    """Reads `vision_config` of a Hugging Face config.json; None where there is none, as in a text model.

    Raises:
        ConfigError: naming the field.
    """
    outer = Fields(values, where)
    if not outer.has("vision_config"):
        return None
    fields, text = outer.sub("vision_config"), outer.sub("text_config")
    fields.only("model_type", *_TYPES)
    fields.only("hidden_act", "gelu_pytorch_tanh")
    for name in ("rope_parameters", "rope_scaling"):
        text.sub(name).only("mrope_interleaved", True)
    rotation = fields.sub("rope_parameters")
    rotation.only("rope_type", "axial", "default")
    if fields.has("deepstack_visual_indexes") and (taps := fields.values["deepstack_visual_indexes"]):
        raise ConfigError(f"{fields.where}: deepstack_visual_indexes is {taps!r}; supported is a tower without taps")
    read: dict[str, Any] = {name: fields.get(int, name, minimum=1) for name in _SIZES}
    read |= {name: outer.get(int, name, minimum=0) for name in PICTURE_TOKENS}
    config = Config(**read, rope_theta=rotation.get(float, "rope_theta", default=THETA, minimum=1))
    rotation.refuse_others(())
    fields.refuse_others(WITHOUT_EFFECT)
    if config.out_hidden_size != (width := text.get(int, "hidden_size", minimum=1)):
        raise ConfigError(f"{fields.where}: out_hidden_size is {config.out_hidden_size}, and the language model's hidden_size {width}")
    return config


def in_tiles(cfg: Config) -> Config:
    """A configuration for NPUs, whose fused attention takes heads of whole tiles: each half is padded, since rotations pair the halves.

    Zeros in the matrices cost a tenth of two products of a layer; to pad queries, keys and values, and cut the result, costs eight passes
    over them.
    """
    return replace(cfg, stored_width=2 * _TILE * math.ceil(cfg.head_dim / 2 / _TILE))


def _placed(cfg: Config) -> tuple[PaddedHeads, ...]:
    """Where the channels of heads lie that are padded, by units that divide both widths of a half."""
    if cfg.head_width == cfg.head_dim:
        return ()
    half, stored = cfg.head_dim // 2, cfg.head_width // 2
    unit = math.gcd(half, stored)
    real, wide, halves = half // unit, stored // unit, 2 * cfg.num_heads
    places = tuple(part * real + i if i < real else -1 for part in range(halves) for i in range(wide))
    return (PaddedHeads(_CHANNELS, halves * real, places, (), 1),)


def prepared(cfg: Config, mean: Sequence[float], std: Sequence[float], rescale: float) -> Config:
    """The configuration with the mean and standard deviation of a processor's file, which are of bytes times `rescale`."""
    # In f32, as the published processor folds them.
    means, stds = (tuple((torch.tensor(each) * (1.0 / rescale)).tolist()) for each in (mean, std))
    return replace(cfg, mean=means, std=stds)


def normalised(cfg: Config, patches: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Patches [S, N, patch_dim] u8 as `encode` reads them, bit for bit what the published processor makes of them, and then in `dtype`."""
    channels = list(zip(cfg.mean, cfg.std, strict=True))
    if len(set(channels)) == 1:
        channels = channels[:1]  # one operation, where all are alike
    parts = [((part.float() - mean) / std).to(dtype) for part, (mean, std) in zip(patches.chunk(len(channels), -1), channels, strict=True)]
    return torch.cat(parts, -1) if len(parts) > 1 else parts[0]


def abstract_params(cfg: Config, dtype: torch.dtype) -> Tree:
    """Tree of Param: `patch`, `positions`, `blocks`, `merger`; what a checkpoint may quantise are matrices with biases.

    A patch's weights of all frames are kept apart, so that videos share them.
    """
    width, wide, joined = cfg.hidden_size, cfg.intermediate_size, cfg.hidden_size * cfg.merged
    table, mixed = (cfg.num_position_embeddings, width), cfg.num_heads * cfg.head_width

    def layer(index: int) -> dict[str, Tree]:
        prefix = f"{PREFIX}blocks.{index}."
        return {
            "attention_norm": _norm(prefix + "norm1", width, dtype),
            "qkv": _matrix(prefix + "attn.qkv", 3 * mixed, width, dtype, (Parts(_CHANNELS, (mixed,) * 3), None)),
            "out": _matrix(prefix + "attn.proj", width, mixed, dtype, (None, _CHANNELS)),
            "mlp_norm": _norm(prefix + "norm2", width, dtype),
            "up": _matrix(prefix + "mlp.linear_fc1", wide, width, dtype),
            "down": _matrix(prefix + "mlp.linear_fc2", width, wide, dtype),
        }

    return {
        "patch": _patch(cfg, dtype),
        "positions": Param(Aval(table, dtype), Source((PREFIX + "pos_embed.weight",), (table,)), "embedding"),
        "blocks": [with_real_sources(layer(index), _placed(cfg)) for index in range(cfg.depth)],
        "merger": {
            "norm": _norm(PREFIX + "merger.norm", width, dtype),
            "up": _matrix(PREFIX + "merger.linear_fc1", joined, joined, dtype),
            "down": _matrix(PREFIX + "merger.linear_fc2", cfg.out_hidden_size, joined, dtype),
        },
    }


def _matrix(name: str, rows: int, columns: int, dtype: torch.dtype, axes: tuple[SourceAxis, ...] = (None, None)) -> Param:
    source = Source((name + ".weight",), ((rows, columns),), axes=(axes,))
    return Param(Aval((rows, columns), dtype), source, role="column", biased=True)


def _norm(name: str, width: int, dtype: torch.dtype) -> Param:
    return replace(norm(name, width, dtype, 0.0), biased=True)


def _patch(cfg: Config, dtype: torch.dtype) -> dict[str, Param]:
    """A convolution whose stride is its kernel, as a matrix with a bias; it is never quantised."""
    name, width = PREFIX + "patch_embed.proj.", cfg.hidden_size
    shape = (width, cfg.in_channels, cfg.temporal_patch_size, cfg.patch_size, cfg.patch_size)
    kernel = Source((name + "weight",), (shape,), lambda weight: weight.flatten(1), lambda weight: (weight.view(shape),))
    bias = Source((name + "bias",), ((width,),))
    return {"weight": Param(Aval((width, cfg.patch_dim), dtype), kernel), "bias": Param(Aval((width,), dtype), bias, "zeros")}


def encode(cfg: Config, params: Tree, inputs: Tree) -> torch.Tensor:
    """Runs the tower over S segments of at most N patches, whatever they hold behind their own.

    Args:
        params: tree of `abstract_params` as it is stored (`quant.declare.stored`).
        inputs: `patches` [S, N, patch_dim], normalised, in blocks of merge x merge (`ops.picture_places`); `grids` [S, 2] i32, rows and
            columns of patches, 0 and 0 for a segment of padding. N is a multiple of `merged`.

    Returns:
        [S, N / merged, out_hidden_size]; of a segment the first rows x columns / merged are its own, and the others finite.
    """
    patches, grids = inputs["patches"], inputs["grids"]
    S, N, _ = patches.shape
    lengths = grids[:, 0] * grids[:, 1]
    live = torch.arange(N, dtype=torch.int32, device=grids.device)[None] < lengths[:, None]
    patches = torch.where(live[:, :, None], patches, torch.zeros((), dtype=patches.dtype, device=patches.device))
    rows, columns, taps, weights = ops.picture_places(grids, N, cfg.spatial_merge_size, cfg.side)
    x = quant.linear(patches.reshape(S * N, -1), params["patch"]) + _positions(params["positions"], taps, weights)
    angles = [ops.rope_angles(axis.reshape(-1), cfg.head_dim // 2, cfg.rope_theta) for axis in (rows, columns)]
    cos, sin = (torch.cat(parts, -1) for parts in zip(*angles, strict=True))
    for layer in params["blocks"]:
        x = block("vision", _layer, (cfg, S), layer, lengths, cos, sin, x)
    merger = params["merger"]
    joined = _layer_norm(x, merger["norm"]).view(S * N // cfg.merged, -1)
    # The exact formula here and the other one in the layers, as published.
    rows_out = quant.linear(ops.gelu(quant.linear(joined, merger["up"]), False), merger["down"])
    return rows_out.view(S, N // cfg.merged, -1)


def _positions(table: torch.Tensor, taps: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Learned positions [S N, h] in the dtype of the table; summed in f32."""
    around: torch.Tensor = ops.embed(taps.reshape(-1), table).view(-1, taps.shape[-1], table.shape[-1])
    return (around.float() * weights.reshape(-1, taps.shape[-1], 1)).sum(1).to(table.dtype)


def _layer(
    cfg: Config, segments: int, layer: Tree, lengths: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """One layer of the residual stream [S N, h]."""
    heads = _linear(_layer_norm(x, layer["attention_norm"]), layer["qkv"]).view(-1, 3, cfg.num_heads, cfg.head_width)
    q, k, v = heads.unbind(1)
    q, k, v = (each.reshape(segments, -1, cfg.num_heads, cfg.head_width) for each in (ops.rope(q, cos, sin), ops.rope(k, cos, sin), v))
    mixed: torch.Tensor = ops.segment_attention(q, k, v, lengths, cfg.head_dim**-0.5)
    x = x + _linear(mixed.view(len(x), -1), layer["out"])
    return x + _linear(ops.gelu(_linear(_layer_norm(x, layer["mlp_norm"]), layer["up"]), True), layer["down"])


def _linear(x: torch.Tensor, weight: Tree) -> torch.Tensor:
    return quant.linear(x, weight, joined=True)


def _layer_norm(x: torch.Tensor, weights: Tree) -> torch.Tensor:
    normed: torch.Tensor = ops.layer_norm(x, weights["weight"], weights["bias"], EPS)
    return normed


TOWER = Tower("vision", read_config, prepared, abstract_params, normalised, encode, in_tiles)
"""The record for `Family.tower`."""
