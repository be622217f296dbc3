"""The GLM-5 models: those of DeepSeek V3.2 whose indexer rotates channels in pairs; from 5.2 on few layers have one, and the rest read what
it chose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..graphs.types import Tree
from . import decoder, deepseek_v3, deepseek_v32, latent_attention, mtp, sparse_latent_attention
from .batch import Batch
from .config import Fields
from .deepseek_v3 import DRAFT, DRAFT_HEAD, OF_DRAFT

NAME = "glm_moe_dsa"
FULL, SHARED = "full", "shared"
"""Layers with an indexer, and those that read the keys which the last such layer before them chose."""

_LETTERS = {"F": FULL, "S": SHARED}
OF_SHARED = "_shared"
"""Ends the kinds of shared layers in `layer_kinds`."""

CHOSEN = "chosen"
"""Input of later drafts: the keys [B, 1, K] that the first one chose."""


@dataclass(frozen=True, kw_only=True)
class Config(deepseek_v32.Config):
    """Sizes of a GLM-5 model; field names follow its config.json.

    Attributes:
        index_share_for_mtp_iteration: whether all drafts of a step read the keys that the first one chose.
    """

    indexer_rope_interleave: bool = True
    index_share_for_mtp_iteration: bool = False

    @property
    def num_indexers(self) -> int:
        """How many layers have an indexer."""
        return sum(not kind.endswith(OF_SHARED) for kind in self.layer_kinds)

    def mixer(self, kind: str) -> deepseek_v3.Mixer:
        """A shared layer has neither parameters nor a pool of an indexer."""
        return latent_attention if kind.endswith(OF_SHARED) else super().mixer(kind)

    def layer(self, kind: str) -> decoder.Layer:
        if kind.endswith(OF_SHARED):
            return decoder.Layer(kind, sparse_latent_attention.apply_to, reads=True)
        shares = self.num_indexers < len(self.layer_kinds)
        return decoder.Layer(kind, sparse_latent_attention.apply_and_pass) if shares else super().layer(kind)

    def checks(self) -> list[tuple[bool | int, str]]:
        return [*super().checks(), (self.layer_kinds[0].endswith(OF_SHARED), "the first layer must have an indexer")]


def read_config(values: Mapping[str, Any], where: str = "config.json") -> Config:
    """Reads the fields of a Hugging Face config.json.

    Raises:
        ConfigError: naming the field.
    """
    pattern = values.get("index_topk_pattern")
    if isinstance(pattern, str):
        values = {**values, "index_topk_pattern": [_LETTERS.get(letter, letter) for letter in pattern]}
    fields = Fields(values, where)
    # As transformers writes it beside the other.
    fields.only("num_experts", fields.get(int, "n_routed_experts", "num_local_experts", default=0))
    # Routers have logits in float32 here, whatever a file says.
    fields.only("moe_router_dtype", "float32")
    # Files that leave the field out are of models that were trained with pairs all the same.
    interleave = fields.get(bool, "indexer_rope_interleave", default=True)
    once = fields.get(bool, "index_share_for_mtp_iteration", default=False)
    types, sizes = _indexer_types(fields), deepseek_v32.index_sizes(fields)
    read = deepseek_v3.config_fields(fields)
    kinds = tuple(kind + OF_SHARED * (own == SHARED) for kind, own in zip(read["layer_kinds"], types, strict=True))
    sizes |= {"indexer_rope_interleave": interleave, "index_share_for_mtp_iteration": once}
    return Config(**sizes, **{**read, "layer_kinds": kinds})


def _indexer_types(fields: Fields) -> tuple[str, ...]:
    """FULL or SHARED for each layer: as listed, as in the pattern, or by how many layers share an indexer; the first that is there."""
    every = fields.get(int, "index_topk_freq", default=1, minimum=1)
    offset = fields.get(int, "index_skip_topk_offset", default=2, minimum=0)
    listed, pattern = (fields.kinds(name, FULL, SHARED) for name in ("indexer_types", "index_topk_pattern"))
    counted = tuple(SHARED if max(i - offset + 1, 0) % every else FULL for i in range(fields.num_layers()))
    return listed or pattern or counted


def extend_draft_cache(cfg: Config, params: Tree, state: Tree, inputs: Tree, hidden: torch.Tensor, *, first: bool) -> tuple[Tree, Tree]:
    """As `deepseek_v3.extend_draft_cache`; where keys are chosen already, none of the indexer's is written.

    Nothing is missing: the next step writes all accepted tokens anew.
    """
    kind = OF_DRAFT + OF_SHARED if CHOSEN in inputs else OF_DRAFT
    return deepseek_v3.extend_draft_cache(cfg, params, state, inputs, hidden, first=first, kind=kind)


def draft(cfg: Config, params: Tree, state: Tree, inputs: Tree, rows: Tree) -> torch.Tensor | tuple[torch.Tensor, Tree]:
    """As `deepseek_v3.draft`; with `index_share_for_mtp_iteration` it passes the chosen keys on, or reads them."""
    if not cfg.index_share_for_mtp_iteration:
        return deepseek_v3.draft(cfg, params, state, inputs, rows)
    own, batch = params[DRAFT], Batch.of(inputs, cfg.rotary)
    operands = (cfg, own["layer"]["mixer"], state[DRAFT], batch, rows)
    if CHOSEN in inputs:
        return mtp.finished(cfg, own, batch, sparse_latent_attention.attend_to(*operands, inputs[CHOSEN]), rows["stream"])
    mixed, chosen = sparse_latent_attention.attend_and_choose(*operands)
    return mtp.finished(cfg, own, batch, mixed, rows["stream"]), {CHOSEN: chosen}


FAMILY = replace(
    deepseek_v32.FAMILY,
    name=NAME,
    model_types=(NAME,),
    read_config=read_config,
    draft_head=replace(DRAFT_HEAD, extend_cache=extend_draft_cache, draft=draft),
)
