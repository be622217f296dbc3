"""tools/artifact_model.py: a manifest gives the variant, the layout and the shares of its model."""

from __future__ import annotations

import torch
from support.manifests import MOE, manifest, physical

from npucompile.graphs.types import Bucket, Mesh
from npucompile.models.expert_placement import ExpertPlacement
from npucompile.models.quant.recipes import formats_of_scheme
from npucompile.models.sharding_rules import rules_of
from npucompile.models.variant import Variant
from npucompile.tools.artifact_model import full_model, spreads
from npucompile.tools.builder.rank_memory import share


def test_a_model_has_the_variant_of_its_artifact():
    variant = full_model(manifest(mesh="dp=1,tp=16")).config.variant
    assert (variant.kv_repeat, variant.recurrent, variant.dispatches_in_parts) == (8, torch.bfloat16, True)
    assert (variant.formats, dict(variant.shards)) == (formats_of_scheme("w4a8", MOE), {"q_heads": 16, "delta_heads": 16, "ffn": 16})


def test_a_target_that_gathers_gathers():
    assert full_model(manifest(target="ascend-a2")).config.variant.most_dispatched == 0
    assert full_model(manifest(target="cpu")).config.variant.most_dispatched == Variant().most_dispatched


def test_experts_are_laid_out_as_the_rules_of_the_artifact_say():
    whole, split = manifest(), manifest(rules={})
    assert (spreads(whole), spreads(split)) == (True, False)
    model, mesh = full_model(whole), Mesh.parse("dp=2,tp=2")
    spread, local = (rules_of(model.config, mesh, expert_parallel=parallel).num_shards("experts", mesh) for parallel in (True, False))
    assert (spread, local) == (4, 1)


def test_physical_experts_are_those_of_the_parameters_where_the_map_says():
    plain = manifest()
    mapped = manifest(params=physical(528, 4), model={**plain.model, "expert_map": [[0, 1, 1]]})
    model = full_model(mapped)
    assert (model.config.variant.physical_experts, model.config.variant.expert_ranks) == (528, 4)
    assert model.placement == ExpertPlacement(((0, 1, 1),))
    assert full_model(plain).placement is None
    assert full_model(plain).config.variant.physical_experts == 0
    assert rules_of(model.config, Mesh.parse("dp=8,tp=2")).num_shards("experts", Mesh.parse("dp=8,tp=2")) == 16


def test_a_group_splits_the_tokens_of_steps_that_have_one_a_device():
    assert [share(Bucket("decode", batch, 4), batch * 4, 16) for batch in (1, 4, 5)] == [4, 1, 2]
