"""The model that an artifact was built from, in the variant and the layout in which the artifact has it."""

from __future__ import annotations

import json
from dataclasses import replace

import torch

from ..graphs.types import Mesh
from ..lowering.artifact.manifest import Manifest
from ..lowering.platform import Platform
from ..models import context_parallel, draft_source, draft_vocabulary, expert_placement, registry, sharding_rules
from ..models.deployed import deployed, deployed_tower
from ..models.expert_placement import ExpertPlacement
from ..models.family import ModelConfig
from ..models.family_file import FamilyFile
from ..models.quant.formats import Formats
from ..models.step import Model
from ..models.variant import Variant
from .builder.targets import target


def with_variant(model: Model, variant: Variant) -> Model:
    """The same model in another variant."""
    return replace(model, config=replace(model.config, variant=variant))


def full_model(manifest: Manifest) -> Model:
    """The artifact's own model in the artifact's variant."""
    family = FamilyFile.recorded(manifest.model)
    model = registry.from_config(str(manifest.model["name"]), json.loads(manifest.model["config"]), family=family)
    if draft := draft_source.recorded(manifest.model):
        model = draft_source.attached(model, json.loads(draft.text), draft.parts)
    placement = ExpertPlacement.recorded(manifest.model)
    model = replace(with_variant(model, variant_of(manifest, model.config)), drafting=manifest.limits.drafts > 0, placement=placement)
    if (recorded := manifest.model.get("tower")) is None or model.family.tower is None:
        return model
    read = model.family.tower.read_config(json.loads(manifest.model["config"]), "config.json")
    formats, local = model.config.variant.formats, target(manifest.target).local
    return replace(model, tower=deployed_tower(model.family.tower, read, recorded["processor"], formats, local=local))


def variant_of(manifest: Manifest, config: ModelConfig) -> Variant:
    """The variant in which an artifact has a model of that configuration."""
    mesh, pools = Mesh.parse(manifest.mesh), [leaf for leaf in manifest.state if leaf.name.endswith(".delta")]
    where, shapes = target(manifest.target), [(leaf.path, leaf.aval.shape) for leaf in manifest.params]
    physical = expert_placement.physical_count(shapes)
    return deployed(
        config,
        Formats.of_fields(manifest.formats),
        mesh,
        sharding_rules.rules(
            mesh,
            experts=physical or config.num_experts,
            expert_parallel=spreads(manifest),
            tokens=mesh.axis("tp"),
            sliced=context_parallel.AXIS in manifest.rules,
        ),
        recurrent=pools[0].aval.dtype if pools else torch.float32,
        dispatches=where.dispatches,
        local=where.local,
        backend=next((entry.backend for entry in manifest.graphs), ""),
        platform=Platform.of(manifest.platform),
        draft_vocab=draft_vocabulary.recorded(manifest.params),
        physical_experts=physical,
        tells_experts=any(entry.tells_experts for entry in manifest.graphs),
    )


def spreads(manifest: Manifest) -> bool:
    """Whether an artifact has whole experts spread over all devices; if not, each is split over a group, or there are none."""
    return "experts" in manifest.rules
