"""models/config_fields.py: whatever changes what transformers computes is read or refused, and what published files say loads."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import oracle
from transformers import AutoConfig, AutoModelForCausalLM

from npucompile.graphs.errors import ConfigError, ModelError
from npucompile.models import registry
from npucompile.models.presets import PRESETS

CASES = (
    *("plain", "plain-yarn", "plain-moe-some-dense", "dense", "moe", "next"),
    *("latent", "latent-yarn", "sparse", "pairs", "shared-index-listed", "lite", "biased"),
)
NESTED = "rope_parameters"


def fields(values: dict[str, Any]) -> list[tuple[str, ...]]:
    """Paths of the fields of a file."""
    return [(name,) for name in values if name != NESTED] + [(NESTED, name) for name in values[NESTED]]


def others(value: Any) -> Iterator[Any]:
    """Values that a field might have in place of this one."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (value + 1, value * 2 + 1)
    elif isinstance(value, str):
        yield from ("sigmoid", "linear")
    elif isinstance(value, list):
        yield from (value[::-1], [*value[1:], "sliding_attention"], [0])
    else:
        yield from (1, True, 0.5, "sigmoid")


def changed(values: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    copied = copy.deepcopy(values)
    (copied[NESTED] if len(path) > 1 else copied)[path[-1]] = value
    return copied


@torch.no_grad()
def differs(values: dict[str, Any], reference: oracle.Oracle, ids: list[int]) -> bool:
    """Whether transformers computes something else; what it refuses is nothing."""
    try:
        config = AutoConfig.for_model(**values)
        config._attn_implementation = config._experts_implementation = "eager"
        theirs = AutoModelForCausalLM.from_config(config).eval().float()
        theirs.load_state_dict(reference.theirs.state_dict())
        logits = theirs(torch.tensor([ids])).logits[0]
    except Exception:
        return False
    return not torch.allclose(logits, reference.logits(ids), atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_a_field_that_changes_what_transformers_computes_is_read_or_refused(name):
    """Every field of the class of the configuration, with other values: those that we pass over change no logit."""
    reference = oracle.case(name)
    values, ids = reference.values | {"output_router_logits": False}, reference.prompt(24)
    drafts = {"num_nextn_predict_layers": 0} if name == "next" else {}
    passed, wrong = [], []
    for path in fields(values):
        if path == ("model_type",):
            continue
        value = values[NESTED][path[1]] if len(path) > 1 else values[path[0]]
        for other in others(value):
            edited = changed(values, path, other)
            try:
                read = registry.from_config("random", edited | drafts)
            except ModelError:
                continue
            if read == reference.model:
                passed.append(path)
                wrong += [(path, other)] if differs(edited, reference, ids) else []
    assert not wrong
    # The oracle was asked: not everything is refused.
    assert ("attention_dropout",) in passed


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("plain", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
        ("plain", {"final_logit_softcapping": 30.0}),
        ("plain", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "short_factor": [1.0]}}),
        ("plain-moe", {"num_local_experts": 6}),
        ("dense", {"output_gate_type": "sigmoid"}),
        ("moe", {"norm_topk_prob": False}),
        ("moe", {"mlp_only_layers": [0]}),
        ("next", {"output_gate_type": "sigmoid"}),
        ("next", {"attn_output_gate": False}),
        ("latent", {"num_key_value_heads": 2}),
        ("latent", {"mlp_bias": True}),
        ("latent", {"use_qk_norm": True}),
        ("plain", {"use_qk_norm": False}),
        ("plain", {"qkv_bias": True}),
        ("plain", {"is_causal": False}),
        ("plain", {"use_rope": False}),
        ("plain", {"position_embedding_type": "alibi"}),
        ("plain", {"quantization": {"group_size": 64, "bits": 4}}),
        ("plain", {"dual_chunk_attention_config": {"chunk_size": 262144}}),
        ("plain-moe", {"shared_expert_intermediate_size": 24}),
        ("dense", {"use_qk_norm": False}),
        ("next", {"use_qk_norm": False}),
        ("sparse", {"index_topk_freq": 4}),
        ("sparse", {"index_topk_pattern": "FSFS"}),
        ("sparse", {"layer_types": ["indexed_attention", "full_attention"]}),
    ],
)
def test_a_field_that_other_engines_read_is_refused_by_name(name, change):
    values = oracle.CASES[name] | ({"num_experts": 5} if name == "plain-moe" else {})
    with pytest.raises(ConfigError, match=str(next(iter(change)) if NESTED not in change else "short_factor")):
        registry.from_config("x", values | change)


MALFORMED = [
    # deepseek_v3
    ("latent", {"kv_lora_rank": None}, "kv_lora_rank is missing"),
    ("latent", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; supported is 'sigmoid'"),
    ("latent", {"topk_method": "greedy"}, "topk_method is 'greedy'; supported is 'noaux_tc'"),
    ("latent", {"attention_bias": True}, "attention_bias is True; supported is False"),
    ("latent", {"moe_layer_freq": 2}, "moe_layer_freq is 2; supported is 1"),
    ("latent", {"qk_rope_head_dim": 5}, "head_dim * partial_rotary_factor is 5"),
    ("latent", {"n_group": 3}, "n_routed_experts must be a multiple of n_group"),
    ("latent", {"n_group": 8}, "a group must have two experts at least"),
    ("latent", {"topk_group": 5}, "topk_group must not exceed n_group"),
    ("latent", {"num_experts_per_tok": 5}, "num_experts_per_tok must not exceed the experts of topk_group groups"),
    ("latent", {"norm_topk_prob": None}, "norm_topk_prob is missing"),
    ("latent", {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers must be 0 or 1"),
    ("latent", {"first_k_dense_replace": 1, "intermediate_size": None}, "intermediate_size is missing"),
    # deepseek_v32
    ("sparse", {"index_topk": None}, "index_topk is missing"),
    ("sparse", {"index_n_heads": 0}, "index_n_heads is 0; expected at least 1"),
    ("sparse", {"index_head_dim": 4}, "index_head_dim must be even, and hold a rotary part"),
    ("sparse", {"q_lora_rank": None}, "q_lora_rank: the indexer reads compressed queries"),
    ("sparse", {"indexer_rope_interleave": True}, "indexer_rope_interleave is True; supported is False"),
    # glm4_moe
    ("biased", {"num_key_value_heads": 3}, "num_attention_heads must be a multiple of num_key_value_heads"),
    ("biased", {"head_dim": 9, "partial_rotary_factor": None, NESTED: {"rope_theta": 1e4, "partial_rotary_factor": 0.9}}, "head_dim"),
    ("biased", {"attention_bias": 1}, "attention_bias is 1; expected bool"),
    ("biased", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; supported is 'sigmoid'"),
    ("biased", {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers must be 0 or 1"),
    ("biased", {"sliding_window": 128}, "sliding_window is 128, and nothing here reads it"),
    ("biased", {"num_key_value_heads": None}, "num_key_value_heads is missing"),
    # glm_moe_dsa
    ("pairs", {"indexer_rope_interleave": 1}, "indexer_rope_interleave is 1; expected bool"),
    ("pairs", {"moe_router_dtype": "bfloat16"}, "moe_router_dtype is 'bfloat16'; supported is 'float32'"),
    ("pairs", {"num_experts": 11}, "num_experts is 11; supported is 10"),
    ("pairs", {"indexer_types": ["shared", "full", "full"]}, "the first layer must have an indexer"),
    ("pairs", {"indexer_types": ["full", "half", "full"]}, "indexer_types is ['full', 'half', 'full']; expected 3 of 'full' and 'shared'"),
    ("pairs", {"index_topk_pattern": "FXF"}, "index_topk_pattern is ['full', 'X', 'full']; expected 3 of 'full' and 'shared'"),
    ("pairs", {"index_topk_freq": 0}, "index_topk_freq is 0; expected at least 1"),
    ("pairs", {"index_kpool": 4}, "index_kpool is 4, and nothing here reads it"),
    # qwen3
    ("plain", {"head_dim": None}, "head_dim is missing"),
    ("plain", {"head_dim": 15}, "head_dim * partial_rotary_factor is 15"),
    ("plain", {"num_key_value_heads": 2}, "num_attention_heads must be a multiple of num_key_value_heads"),
    ("plain", {"intermediate_size": None}, "intermediate_size is missing"),
    ("plain", {"use_sliding_window": True}, "use_sliding_window is True; supported is False"),
    ("plain", {"attention_bias": True}, "attention_bias is True; supported is False"),
    ("plain-moe", {"norm_topk_prob": None}, "norm_topk_prob is missing"),
    ("plain-moe", {"num_experts_per_tok": 6}, "num_experts_per_tok must not exceed num_experts"),
    ("plain-moe", {"mlp_only_layers": [True]}, "mlp_only_layers is [True]; expected a list of layers"),
    ("plain-moe", {"mlp_only_layers": [0], "intermediate_size": None}, "intermediate_size is missing"),
    # qwen3_next
    ("next", {"norm_topk_prob": None}, "norm_topk_prob is missing"),
    ("next", {"mlp_only_layers": [0], "intermediate_size": None}, "intermediate_size is missing"),
    ("next", {"mlp_only_layers": "all"}, "mlp_only_layers is 'all'; expected a list of layers"),
    ("next", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0; expected at least 1"),
    ("next", {"num_nextn_predict_layers": 2}, "multi-token-prediction layers must be 0 or 1"),
    ("next", {"attention_bias": True}, "attention_bias is True; supported is False"),
    # qwen3_5
    ("dense", {"head_dim": None}, "head_dim is missing"),
    ("dense", {"head_dim": "16"}, "head_dim is '16'; expected int"),
    ("dense", {"hidden_size": 0}, "hidden_size is 0; expected at least 1"),
    ("dense", {"hidden_size": True}, "hidden_size is True; expected int"),
    ("dense", {"vocab_size": 10**400}, "vocab_size is 1000"),
    ("dense", {"rms_norm_eps": math.nan}, "rms_norm_eps is nan"),
    ("dense", {"rms_norm_eps": "tiny"}, "rms_norm_eps is 'tiny'; expected float"),
    ("dense", {"num_key_value_heads": 2}, "num_attention_heads must be a multiple of num_key_value_heads"),
    ("dense", {"linear_num_key_heads": 3}, "linear_num_value_heads"),
    ("dense", {"layer_types": ["full_attention"]}, "expected 4 of 'full_attention' and 'linear_attention'"),
    ("dense", {"layer_types": [{}, {}, {}, {}]}, "layer_types is"),
    ("dense", {"layer_types": ["mamba"] * 4}, "layer_types is"),
    ("dense", {"num_hidden_layers": 10**9, "layer_types": None}, "num_hidden_layers is 1000000000; expected at most 1024"),
    ("dense", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported is 'silu'"),
    ("dense", {"attention_bias": True}, "attention_bias is True; supported is False"),
    ("dense", {"attn_output_gate": False}, "attn_output_gate is False; supported is True"),
    ("dense", {"output_gate_type": "tanh"}, "output_gate_type is 'tanh'; supported is 'swish' or 'silu'"),
    ("dense", {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings is True; supported is False"),
    ("dense", {"mtp_num_hidden_layers": 2}, "multi-token-prediction layers must be 0 or 1"),
    ("dense", {"rope_parameters": []}, "rope_parameters is []; expected an object"),
    ("dense", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "rope_parameters: rope_type is 'longrope'"),
    ("dense", {"rope_parameters": {"rope_type": "default"}}, "rope_theta is missing"),
    ("dense", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "head_dim * partial_rotary_factor"),
    ("dense", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": math.inf}}, "partial_rotary_factor is inf"),
    ("dense", {"rope_scaling": {"type": "dynamic", "factor": 4}}, "rope_scaling: type is 'dynamic'"),
    ("dense", {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1]}}, "mrope_section is [1, 1]; expected 3 numbers"),
    ("dense", {"num_experts": 4}, "num_experts_per_tok is missing"),
    (
        "dense",
        {"num_experts": 4, "num_experts_per_tok": 5, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
        "must not exceed",
    ),
]


@pytest.mark.parametrize(("name", "change", "named"), MALFORMED)
def test_a_malformed_configuration_is_refused_by_field(name, change, named):
    with pytest.raises(ConfigError) as error:
        registry.from_config("x", oracle.CASES[name] | change)
    assert named in str(error.value)


def test_a_field_of_the_file_that_the_wrapped_text_model_contradicts_is_refused():
    values = {"model_type": "qwen3_5", "text_config": oracle.CASES["dense"]}
    assert registry.from_config("x", values | {"hidden_size": 44}) == registry.from_config("x", values)
    with pytest.raises(ConfigError, match=r"config\.json: hidden_size is 45"):
        registry.from_config("x", values | {"hidden_size": 45})


@pytest.mark.parametrize("name", ["latent", "plain"])
def test_scaled_scores_of_a_linear_rotation_are_those_of_transformers(name):
    """`mscale_all_dim` multiplies the scores of latent attention whatever kind the scaling is of."""
    scaled = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0, "mscale_all_dim": 1.0}
    read = registry.from_config("x", oracle.CASES[name] | {NESTED: scaled}).config.rotary
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**oracle.CASES["latent"] | {NESTED: scaled}))
    attention = theirs.model.layers[0].self_attn
    assert read.scaling.softmax == pytest.approx(attention.scaling * attention.qk_head_dim**0.5)


# What published files say beside the fields of the presets (transformers 4.51 to 5, deepseek-ai/DeepSeek-V3.2, unsloth, ModelSlim).
PUBLISHED: dict[str, Any] = {
    "_name_or_path": "x", "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": [151645, 151643], "pad_token_id": None,
    "initializer_range": 0.02, "torch_dtype": "bfloat16", "dtype": "bfloat16", "transformers_version": "4.57.0.dev0", "use_cache": True,
    "output_router_logits": False, "router_aux_loss_coef": 0.001, "unsloth_fixed": True, "use_sliding_window": False,
    # Of models that were tuned or converted.
    "attn_implementation": "flash_attention_2", "is_causal": True, "use_flash_attn": True, "model_max_length": 32768, "init_std": 0.02,
    "gradient_checkpointing": True, "base_model": "Qwen/Qwen3-8B", "trust_remote_code": True, "loss_type": "ForCausalLM",
    "hidden_dropout_prob": 0.1, "transformers.js_config": {"dtype": "q4"}, "use_bfloat16": True, "pruned_heads": {}, "tags": ["x"],
}  # fmt: skip
OF_FAMILIES: dict[str, dict[str, Any]] = {
    # The second half is of Qwen3-Coder-480B-A35B-Instruct.
    "qwen3": {
        "sliding_window": None, "max_window_layers": 64, "qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True,
    },
    "qwen3_5": {"mamba_ssm_dtype": "float32", "mlp_only_layers": [], "output_gate_type": "swish", "language_model_only": False},
    "qwen3_next": {"mlp_only_layers": []},
    "minimax": {"layernorm_full_attention_beta": 1.0, "mlp_intermediate_size": 8192, "shared_moe_mode": "sigmoid", "sliding_window": None},
    "llama": {"sliding_window": None, "max_window_layers": 28, "pretraining_tp": 1, "router_aux_loss_coef": 0.02, "use_mrope": False},
    "deepseek_v3": {
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001, "seq_aux": True, "ep_size": 1,
        "pretraining_tp": 1, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"},
    },
}  # fmt: skip
OF_FAMILIES["glm4_moe"] = OF_FAMILIES["kimi_k2"] = OF_FAMILIES["glm4_moe_lite"] = OF_FAMILIES["deepseek_v3"]
OF_FAMILIES["deepseek_v32"] = OF_FAMILIES["deepseek_v3"]
OF_FAMILIES["glm_moe_dsa"] = {**OF_FAMILIES["deepseek_v3"], "moe_router_dtype": "float32", "mlp_bias": False, "num_experts": 256}


@pytest.mark.parametrize("name", PRESETS)
def test_files_as_they_are_published_load(name):
    model = registry.find(name).model
    values = {**PRESETS[name], **PUBLISHED, **OF_FAMILIES[model.family.name]}
    assert registry.from_config(name, values) == model
    if model.family.name != "qwen3_5":
        return
    wrapper = {"model_type": "qwen3_5", "vision_config": {"depth": 27}, "image_token_id": 1, "vision_end_token_id": 2, "video_token_id": 3}
    assert registry.from_config(name, {**wrapper, "text_config": values}) == model
