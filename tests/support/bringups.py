"""Bring-ups of small artifacts on emulated devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from support import faulty, tiny
from support.once import made_once

from npucompile.lowering import device
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.tools.builder import driver, pool
from npucompile.tools.prove.bringup.results import Wanted
from npucompile.tools.prove.bringup.rungs import Bringup
from npucompile.tools.ranks.rank_settings import RankSettings

ONE_BUCKET: dict[str, Any] = {"buckets": (1,), "num_speculative_tokens": 1}
TWO_LAYERS: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


def npu_artifact(
    root: Path, monkeypatch: Any, mesh: str = "1", options: Mapping[str, Any] = MappingProxyType({}), **sizes: Any
) -> Artifact:
    """A small model of four layers for NPUs, with its random weights: decode batches 2 and 4, one draft, prefill 4, but for `options`."""
    checkpoint = tiny.write_checkpoint(root / "checkpoint", **{**tiny.NPU_SIZES, **sizes})
    monkeypatch.setattr(pool, "run", tiny.compile_once)
    driver.build(tiny.planned_device(checkpoint, mesh=mesh, **options), root / "out", root / "cache", tiny.QUIET, jobs=1)
    return Artifact.open(root / "out")


def shared_artifact(factory: pytest.TempPathFactory, name: str, *mesh_and_options: Any, **sizes: Any) -> Artifact:
    """`npu_artifact`, made once a run under a name; not to be changed."""

    def make(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            npu_artifact(folder, patch, *mesh_and_options, **sizes)

    return Artifact.open(made_once(factory, f"bringup-{name}", make) / "out")


def small_artifact(factory: pytest.TempPathFactory, mesh: str = "1") -> Artifact:
    """That of two layers, with one decode bucket of one request; not to be changed."""
    return shared_artifact(factory, f"small-{mesh}", mesh, ONE_BUCKET, **TWO_LAYERS)


def ladder(artifact: Artifact, opens: Callable[..., Any] = device.open_device, wanted: Sequence[str] = (), **options: Any) -> Bringup:
    """A bring-up on emulated devices."""
    planned = {name: setting.value for name, setting in artifact.manifest.environment.items()}
    settings = RankSettings(device="emulated", threads=1, open_device=opens)
    return Bringup(artifact, settings, {**faulty.CHILDREN, **planned}, tiny.QUIET, wanted=Wanted.of(wanted), **options)
