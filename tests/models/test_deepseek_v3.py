"""models/deepseek_v3.py: configurations are read by field, the draft head equals MtpLayer, and copies on disk are named, not read."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from support import oracle

from npucompile.graphs import tree
from npucompile.graphs.errors import CheckpointError, ConfigError
from npucompile.models import checkpoint, deepseek_v3
from npucompile.models.routing import SIGMOID, Routing

TOLERANCE = 1e-4


@pytest.mark.parametrize(
    "name",
    ["latent", "latent-yarn", "latent-whole-queries", "latent-all-dense", "sparse", "pairs", "shared-index", "biased", "biased-raw-heads"],
)
@torch.no_grad()
def test_draft_head_equals_mtp_layer_and_recurses(name):
    oracle.DraftRun(name).check_recursion(TOLERANCE)


@pytest.mark.parametrize("name", ["latent", "latent-whole-queries", "sparse", "pairs", "shared-index", "biased"])
def test_sources_of_the_draft_head_name_every_tensor_of_mtp_layer(name):
    oracle.DraftRun(name).check_sources()


def test_the_layer_behind_the_layers_is_read_when_drafting_and_its_copies_never(tmp_path):
    """As published, it has copies of embedding and head; a model that does not draft reads nothing of it."""
    random = oracle.drafting("latent")
    family, config = random.model.family, random.model.config
    params, behind = family.abstract_params(config, torch.float32), "model.layers.3."
    tensors = {name: tensor.contiguous() for name, tensor in oracle.split(params, random.weights).items()}
    tensors |= {behind + name: torch.randn(97, 44) for name in ("embed_tokens.weight", "shared_head.head.weight")}
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    read = {}
    for directory, extra in (("whole", {}), ("more", {behind + "self_attn.q_bias": torch.zeros(3)})):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "config.json").write_text(json.dumps(random.values))
        save_file(tensors | extra, tmp_path / directory / "model.safetensors")
        read[directory] = checkpoint.open_checkpoint(tmp_path / directory)
    loaded = checkpoint.load(read["whole"], params)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(tree.flatten(loaded), tree.flatten(random.weights), strict=True))
    without = {name: param for name, param in params.items() if name != deepseek_v3.DRAFT}
    assert deepseek_v3.DRAFT not in checkpoint.load(read["more"], without)
    with pytest.raises(CheckpointError, match=r"model.layers.3.self_attn.q_bias is not part of the model"):
        checkpoint.load(read["more"], params)


def test_routing_is_what_the_file_says():
    assert oracle.case("latent").model.config.routing == Routing(SIGMOID, 3, True, 2.5, 4, 2)
    assert oracle.case("latent-whole-queries").model.config.routing == Routing(SIGMOID, 3, False, 2.5, 1, 1)


def test_routers_have_logits_in_float32():
    layer = deepseek_v3.abstract_params(oracle.case("latent").model.config, torch.bfloat16)["layers"][1]["mlp"]
    assert {name for name, param in layer.items() if param.aval.dtype == torch.float32} == {"router", "router_bias"}


def test_older_files_read_the_same():
    values = oracle.CASES["latent-yarn"]
    older = {key: value for key, value in values.items() if key != "rope_parameters"} | {"rope_theta": 10_000, "scoring_func": "sigmoid"}
    scaling = {name: value for name, value in oracle.LATENT_YARN.items() if name not in ("rope_type", "rope_theta")}
    assert deepseek_v3.read_config({**older, "rope_scaling": {"type": "yarn", **scaling}}) == deepseek_v3.read_config(values)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; supported is 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'; supported is 'noaux_tc'"),
        ({"attention_bias": True}, "attention_bias is True; supported is False"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2; supported is 1"),
        ({"qk_rope_head_dim": 5}, "head_dim * partial_rotary_factor is 5"),
        ({"n_group": 3}, "n_routed_experts must be a multiple of n_group"),
        ({"n_group": 8}, "a group must have two experts at least"),
        ({"topk_group": 5}, "topk_group must not exceed n_group"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok must not exceed the experts of topk_group groups"),
        ({"norm_topk_prob": None}, "norm_topk_prob is missing"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers must be 0 or 1"),
        ({"first_k_dense_replace": 1, "intermediate_size": None}, "intermediate_size is missing"),
    ],
)
def test_a_malformed_configuration_is_refused_by_field(change, named):
    with pytest.raises(ConfigError) as error:
        deepseek_v3.read_config({**oracle.CASES["latent"], **change})
    assert named in str(error.value)
