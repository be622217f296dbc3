"""Encode buckets as graphs for NPUs: of published towers at full size, and of small ones that are run on emulated devices."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from support import golden_graphs

from npucompile.graphs.ir.trace import trace
from npucompile.graphs.passes.optimise import optimise
from npucompile.graphs.spmd.partition import PartitionedProgram, partition
from npucompile.graphs.types import Bucket, Limits, Mesh, Rules
from npucompile.lowering.backend import CompiledFile, backend
from npucompile.lowering.lower import LoweredProgram
from npucompile.lowering.platform import CANN_RELEASES, CPU, Platform
from npucompile.models import encode_step, registry, vision
from npucompile.models.quant.recipes import formats_of_scheme
from npucompile.models.step import Model

MODELSLIM = formats_of_scheme("w4a8", "qwen3.5-397b").rules
"""Of towers, it stores every matrix of a layer but the second of its feed-forward in int8."""

IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
_WIDE = {"depth": 27, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304, "num_position_embeddings": 2304}
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3.5-397b": _WIDE,
    "qwen3.5-27b": _WIDE,
    "qwen3.5-35b-a3b": _WIDE,
    "qwen3.5-4b": {**_WIDE, "depth": 24, "hidden_size": 1024, "intermediate_size": 4096},
}
"""Preset -> sizes of its tower. Heads are 72 wide, and 64 in the last one."""


def published(name: str, quantised: bool = False) -> tuple[Model, vision.Config]:
    """A preset and its tower's configuration for NPUs."""
    model = registry.find(name).model
    width = model.config.hidden_size
    rest = {"in_channels": 3, "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2, "hidden_act": "gelu_pytorch_tanh"}
    sizes = {**PUBLISHED[name], **rest, "out_hidden_size": width}
    cfg = vision.read_config({"text_config": {"hidden_size": width}, "vision_config": sizes, **dict.fromkeys(IDS, 1)})
    assert cfg is not None
    return model, stored(cfg, quantised)


def stored(cfg: vision.Config, quantised: bool) -> vision.Config:
    """A configuration whose parameters are as NPUs take them."""
    formats = replace(cfg.variant.formats, rules=MODELSLIM if quantised else ())
    return replace(vision.in_tiles(cfg), variant=replace(cfg.variant, formats=formats))


def partitioned(model: Model, cfg: vision.Config, bucket: Bucket, limits: Limits, dtype: torch.dtype) -> PartitionedProgram:
    """The program of a bucket on one device, after all passes."""
    return optimise(partition(trace(encode_step.program(model, cfg, bucket, limits, dtype)), Mesh(), Rules()))


def compiled(graph: PartitionedProgram, chosen: str, home: Path, platform: Platform = CPU) -> tuple[LoweredProgram, CompiledFile]:
    """It as a backend for NPUs makes it."""
    of = backend(chosen)
    of.prepare(home)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lowered = of.lower(graph, platform)
        return lowered, of.compile(lowered, cache_dir=home, threads=0)


@dataclass(frozen=True)
class Case:
    """A graph that is compared with the stored one.

    Attributes:
        tower: of `PUBLISHED`.
        depth: layers, or 0 for all of them.
    """

    tower: str
    chosen: str
    cann: str
    quantised: bool = False
    depth: int = 0

    @property
    def name(self) -> str:
        size = f" of {self.depth} layers" if self.depth else ""
        return f"encode {self.tower}{size} {'w8a8' if self.quantised else 'float'} cann {self.cann} {self.chosen}"

    def texts(self, home: Path) -> dict[str, bytes]:
        """What is compared of it."""
        model, cfg = published(self.tower, self.quantised)
        graph = partitioned(model, replace(cfg, depth=self.depth or cfg.depth), BUCKET, LIMITS, torch.bfloat16)
        platform = Platform("ascend910_93", self.cann)
        _, made = compiled(graph, self.chosen, home, platform)
        backend(self.chosen).prove(made, graph, platform)
        assert isinstance(made.data, bytes)
        return {"file": made.data, **golden_graphs.analyses(self.chosen, platform, Mesh(), made.data)}


BUCKET, LIMITS = Bucket("encode", 2, 1024), Limits(128, 9, 3, 1024, picture_rows=1025)


def cases() -> Iterator[Case]:
    """The tower of the 397B in int8 for the oldest and the newest release, and other towers."""
    newest = CANN_RELEASES[-1]
    for chosen in golden_graphs.BACKENDS:
        yield Case("qwen3.5-397b", chosen, newest, True, depth=2)
        for release in (CANN_RELEASES[0], newest):
            yield Case("qwen3.5-397b", chosen, release, True)
    for tower in PUBLISHED:
        yield Case(tower, golden_graphs.BACKENDS[0], newest)
