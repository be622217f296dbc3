"""A small model of every family with the operators that NPUs' graphs have, quantised and written to disk, and its draft head."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support import eagle, oracle, tiny

from npucompile.models import registry
from npucompile.models.quant.description import DESCRIPTION
from npucompile.tools.builder.planned import Plan
from npucompile.tools.quantize.driver import QuantizeSettings, quantize

SIZES = {"buckets": (2,), "prefill": (64,), "max_model_len": 256, "max_num_seqs": 2}
DRAFTS, TOP_K = 2, 16

PLAIN: dict[str, Any] = {
    **tiny.NO_RECURRENT,
    "vocab_size": 260, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "num_experts": 0, "intermediate_size": 64, "max_position_embeddings": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
NO_EXPERTS: dict[str, Any] = {"num_experts_per_tok": None, "moe_intermediate_size": None}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
MIXTRAL: dict[str, Any] = {"model_type": "mixtral", "num_experts": 8, "num_experts_per_tok": 2}
MINIMAX: dict[str, Any] = {**MIXTRAL, "model_type": "minimax_m2", "rotary_dim": 16}
HYBRID: dict[str, Any] = {
    **tiny.NPU_SIZES, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "norm_topk_prob": True,
}  # fmt: skip
# Widths of latents, of their rotary parts and of the indexer are those that NPUs' operators take.
LATENT: dict[str, Any] = {
    **PLAIN, "model_type": "deepseek_v3", "num_hidden_layers": 2, "first_k_dense_replace": 1, "num_key_value_heads": 4, "q_lora_rank": 64,
    "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1,
}  # fmt: skip
SPARSE: dict[str, Any] = {**LATENT, "model_type": "deepseek_v32", "index_n_heads": 16, "index_head_dim": 128, "index_topk": TOP_K}
# Of four layers two have an indexer, whose pairs of channels turn, and drafts after the first have none.
SHARED: dict[str, Any] = {
    **SPARSE, "model_type": "glm_moe_dsa", "num_experts": 8, "num_hidden_layers": 4, "index_n_heads": 32, "n_group": 1, "topk_group": 1,
    "index_topk_freq": 2, "index_skip_topk_offset": 1, "index_share_for_mtp_iteration": True,
}  # fmt: skip
BIASED: dict[str, Any] = {
    **{name: value for name, value in LATENT.items() if not name.startswith(("q_lora", "kv_lora", "qk_", "v_head"))},
    "model_type": "glm4_moe", "num_key_value_heads": 2, "attention_bias": True, "use_qk_norm": True, "n_group": 1, "topk_group": 1,
}  # fmt: skip
HEAD: dict[str, Any] = {
    "draft_vocab_size": 200, "intermediate_size": 64, "head_dim": 32, "max_position_embeddings": 1024,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What is served.

    Attributes:
        values: changes to `tiny.CONFIG`.
        head: whether it drafts with the head of a second checkpoint; else with its own.
        agreeing: weight of the last token in the next one, relative to that of other tests.
        operators: that its graphs must have, among others.
        cache: what is cached in int8.
    """

    values: dict[str, Any] = field(repr=False)
    mesh: str = "tp=2"
    scheme: str = "w8a8"
    backend: str = "ge"
    head: bool = False
    agreeing: float = 1
    operators: tuple[str, ...] = ()
    cache: str = "auto"


DISPATCHED = ("MoeDistributeDispatchV2", "GroupedMatmul")
CASES = {
    "qwen3.5": Case(HYBRID, operators=DISPATCHED),
    "qwen3": Case({**PLAIN, "model_type": "qwen3"}, backend="aclgraph", head=True),
    "qwen3-moe": Case({**PLAIN, **EXPERTS, "model_type": "qwen3_moe"}, "dp=2,tp=2", "w4a8", head=True, operators=DISPATCHED),
    "qwen2": Case({**PLAIN, **NO_EXPERTS, "model_type": "qwen2"}, head=True),
    "mixtral": Case({**PLAIN, **NO_EXPERTS, **MIXTRAL}, "dp=2,tp=2", "w4a8", head=True, operators=DISPATCHED),
    "minimax": Case({**PLAIN, **NO_EXPERTS, **MINIMAX}, "dp=2,tp=2", "w4a8", head=True, operators=DISPATCHED),
    "qwen3-next": Case({**HYBRID, "model_type": "qwen3_next", "mtp_num_hidden_layers": None}, operators=DISPATCHED),
    "deepseek-v3": Case(LATENT, "dp=2,tp=2", agreeing=4, operators=(*DISPATCHED, "FusedInferAttentionScore")),
    "deepseek-v3.2": Case(SPARSE, agreeing=4, operators=(*DISPATCHED, "LightningIndexer", "SparseFlashAttention")),
    "glm-4.7": Case(BIASED, "dp=2,tp=2", agreeing=4, operators=DISPATCHED),
    "glm-5.2": Case(SHARED, "dp=2,tp=2", agreeing=4, operators=(*DISPATCHED, "LightningIndexer", "SparseFlashAttention")),
    "deepseek-v3.2 captured": Case(SPARSE, backend="aclgraph", agreeing=4),
    "glm-5.2 of int8": Case(
        SHARED, "dp=2,tp=2", agreeing=4, operators=(*DISPATCHED, "QuantLightningIndexer", "KvQuantSparseFlashAttention"), cache="int8"
    ),
    "deepseek-v3.2 of int8, captured": Case(SPARSE, backend="aclgraph", agreeing=4, cache="int8"),
}


def checkpoints(case: Case, home: Path) -> tuple[Path, dict[str, str]]:
    """A quantised checkpoint, and the options that name its draft model."""
    floats = tiny.write_checkpoint(home / "float", seed=12 if case.head else 11, agreeing=0 if case.head else case.agreeing, **case.values)
    if case.head:
        eagle.soften(floats)
    quantize(registry.find(floats), home / "quantised", QuantizeSettings(case.scheme), tiny.QUIET)
    described = (home / "quantised" / DESCRIPTION).read_text()
    assert {"w8a8": ': "W8A8_DYNAMIC"', "w4a8": ': "W4A8_DYNAMIC"'}[case.scheme] in described
    if not case.head:
        return home / "quantised", {}
    return home / "quantised", {"draft_model": str(eagle.write_agreeing(home / "head", floats, oracle.build(case.values), **HEAD))}


def planned(case: Case, directory: Path, options: dict[str, str], mesh: str, **sizes: Any) -> Plan:
    """A build of a case's checkpoint for a mesh of devices, with drafts."""
    own = {**SIZES, **options, "kv_cache_dtype": case.cache, **sizes}
    return tiny.planned_device(directory, mesh=mesh, backend=case.backend, num_speculative_tokens=DRAFTS, **own)
