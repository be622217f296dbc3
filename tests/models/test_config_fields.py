"""models/config_fields.py: whatever changes what transformers computes is read or refused, and what published files say loads."""

from __future__ import annotations

import copy
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
