"""The variant of a model that a deployment has: from its formats, its mesh and what its devices run."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch

from ..graphs.types import Mesh, Rules
from . import padding
from .context_parallel import AXIS as SLICES
from .family import Tower
from .head_padding import copies, heads_of
from .quant.formats import FLOAT, UNROUNDED, Formats
from .variant import Variant, fewer_bytes_in_parts, with_fused_experts, with_packages

CONTRACTED = ("q_heads", "delta_heads", "ffn", "shared_ffn", "expert_ffn")
"""Logical axes that row-parallel products contract."""


class LoweredFor(Protocol):
    """Fields of `lowering.platform.Platform` that decide a variant."""

    @property
    def chip(self) -> str: ...
    @property
    def packages(self) -> Collection[str]: ...
    @property
    def serial(self) -> bool: ...


def deployed(
    config: Any,
    formats: Formats,
    mesh: Mesh,
    rules: Rules,
    *,
    recurrent: torch.dtype,
    dispatches: bool,
    local: bool,
    backend: str,
    platform: LoweredFor,
    draft_vocab: int = 0,
    physical_experts: int = 0,
    tells_experts: bool = False,
) -> Variant:
    """The variant.

    Args:
        config: of the model; its own variant is not read.
        rules: layout of parameters.
        recurrent: dtype of recurrent state.
        dispatches: whether devices send tokens to the devices of their experts.
        local: whether devices are processes on this machine.
        backend, platform: what graphs are compiled with, and for.
        draft_vocab, physical_experts, tells_experts: as in `Variant`.
    """
    experts = getattr(config, "num_experts", 0)
    grouped = mesh.size > 1 and experts > 0
    of_experts = [form for pattern, form in formats.rules if "experts" in pattern]
    shards = tuple((axis, rules.num_shards(axis, mesh)) for axis in CONTRACTED if rules.num_shards(axis, mesh) > 1)
    variant = Variant(
        **heads_for(config, mesh.axis("tp"), sliced=rules.num_shards(SLICES, mesh) > 1, powers=not local),
        formats=formats,
        grouped=grouped or (experts > 0 and any(form != FLOAT for form in of_experts)),
        shards=shards if formats.quantises else (),
        padded=tuple((axis, rules.num_shards(axis, mesh)) for axis in padding.AXES if rules.num_shards(axis, mesh) > 1),
        recurrent=recurrent,
        draft_vocab=draft_vocab,
        physical_experts=physical_experts,
        expert_ranks=rules.num_shards("experts", mesh) if physical_experts else 1,
        sliced=rules.num_shards(SLICES, mesh) > 1,
        tells_experts=tells_experts,
    )
    spread = rules.num_shards("experts", mesh) > 1
    if grouped and not (dispatches and spread):
        # Tokens are gathered, which moves more bytes, or stay where they are.
        variant = replace(variant, most_dispatched=0)
    elif grouped and not local:
        rounded = any(form not in UNROUNDED for form in of_experts)
        in_parts = fewer_bytes_in_parts(rounded, config.num_experts_per_tok, mesh.size)
        variant = replace(variant, dispatches_in_parts=in_parts, in_flight=1 if platform.serial else 2)
    variant = with_packages(variant, backend, platform.packages)
    if not grouped or not variant.most_dispatched:
        return variant
    sizes = config.hidden_size, config.moe_intermediate_size
    return with_fused_experts(variant, backend, platform.chip, platform.packages, sizes, mesh.size)


def heads_for(config: Any, group: int, *, sliced: bool = False, powers: bool = False) -> dict[str, Any]:
    """Fields of a variant: copies and padding of heads for so many ranks of a group, those of a draft head of its own included.

    Args:
        sliced: each has all heads of attention.
        powers: of `heads_of`.

    Raises:
        PartitionError: the ranks cannot share some heads.
    """
    share = 1 if sliced else group
    fields: dict[str, Any] = {
        "kv_repeat": copies(config.num_key_value_heads, share),
        "heads": heads_of(getattr(config, "target", config), share, delta=group, powers=powers),
    }
    if (draft := getattr(config, "draft", None)) is not None:
        fields |= {"draft_kv_repeat": copies(draft.num_key_value_heads, share), "draft_heads": heads_of(draft, share)}
    return fields


def deployed_tower(tower: Tower[Any], config: Any, processor: Mapping[str, Any], formats: Formats, *, local: bool) -> Any:
    """A tower's configuration as an artifact has it.

    Args:
        config: as `Tower.read_config` read it.
        processor: fields of `server.pictures.processor.PictureProcessor`.
        formats: of the checkpoint, or of a scheme.
        local: whether it is for this machine.
    """
    prepared = tower.prepared(config, processor["image_mean"], processor["image_std"], processor["rescale_factor"])
    stored = replace(prepared, variant=replace(prepared.variant, formats=formats))
    return stored if local else tower.in_tiles(stored)
