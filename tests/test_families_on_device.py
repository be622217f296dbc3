"""A small model of every family, quantised and written to disk, served with drafts by the ranks of emulated devices.

The oracle is the same quantised checkpoint on one device, eager and without drafts (`support/served.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import eagle, optional, oracle, served, tiny
from support.handovers import Server, hand_over

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.models import registry
from npucompile.models.quant.description import DESCRIPTION
from npucompile.runtime.request import Sampling
from npucompile.tools.quantize.driver import Settings, quantize
from npucompile.tools.ranks.offline import OfflineCompletion, complete

SIZES = {"buckets": (2,), "prefill": (64,), "max_model_len": 256, "max_num_seqs": 2}
PROMPTS = [[1, 2, 3], list(range(100, 190)), [7] * 5]
TOKENS, DRAFTS, TOP_K = 8, 2, 16

PLAIN: dict[str, Any] = {
    **tiny.NO_RECURRENT,
    "vocab_size": 260, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "num_experts": 0, "intermediate_size": 64, "max_position_embeddings": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
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
    """

    values: dict[str, Any] = field(repr=False)
    mesh: str = "tp=2"
    scheme: str = "w8a8"
    backend: str = "ge"
    head: bool = False
    agreeing: float = 1
    operators: tuple[str, ...] = ()


DISPATCHED = ("MoeDistributeDispatchV2", "GroupedMatmul")
CASES = {
    "qwen3.5": Case(HYBRID, operators=DISPATCHED),
    "qwen3": Case({**PLAIN, "model_type": "qwen3"}, backend="aclgraph", head=True),
    "qwen3-moe": Case({**PLAIN, **EXPERTS, "model_type": "qwen3_moe"}, "dp=2,tp=2", "w4a8", head=True, operators=DISPATCHED),
    "qwen3-next": Case({**HYBRID, "model_type": "qwen3_next", "mtp_num_hidden_layers": None}, operators=DISPATCHED),
    "deepseek-v3": Case(LATENT, "dp=2,tp=2", agreeing=4, operators=(*DISPATCHED, "FusedInferAttentionScore")),
    "deepseek-v3.2": Case(SPARSE, agreeing=4, operators=(*DISPATCHED, "LightningIndexer", "SparseFlashAttention")),
    "deepseek-v3.2 captured": Case(SPARSE, backend="aclgraph", agreeing=4),
}


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def checkpoints(case: Case, home: Path) -> tuple[Path, dict[str, str]]:
    """A quantised checkpoint, and the options that name its draft model."""
    floats = tiny.write_checkpoint(home / "float", seed=12 if case.head else 11, agreeing=0 if case.head else case.agreeing, **case.values)
    if case.head:
        eagle.soften(floats)
    quantize(registry.find(floats), home / "quantised", Settings(case.scheme), tiny.QUIET)
    described = (home / "quantised" / DESCRIPTION).read_text()
    assert {"w8a8": ': "W8A8_DYNAMIC"', "w4a8": ': "W4A8_DYNAMIC"'}[case.scheme] in described
    if not case.head:
        return home / "quantised", {}
    return home / "quantised", {"draft_model": str(eagle.write_agreeing(home / "head", floats, oracle.build(case.values), **HEAD))}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.short_cases("qwen3", "qwen3.5")
def test_it_serves_what_one_device_computes(name, tmp_path):
    optional.transfer_engine()
    case = CASES[name]
    directory, options = checkpoints(case, tmp_path)
    plan = tiny.planned_device(directory, mesh=case.mesh, backend=case.backend, num_speculative_tokens=DRAFTS, **{**SIZES, **options})
    tiny.built(plan, tmp_path / "artifact")
    artifact = Artifact.open(tmp_path / "artifact")
    launched = {operator for entry in artifact.manifest.graphs for operator in entry.census}
    assert set(case.operators) <= launched, sorted(launched)
    with served.emulated(artifact, tmp_path / "cache") as executor:
        drafted = complete(executor, PROMPTS, Sampling(), TOKENS, frozenset())
        plain = complete(executor, PROMPTS, Sampling(), TOKENS, frozenset(), speculative_tokens=0)
        # What a family's pools hold travels with a prompt: from this server's memory into other pages of it.
        server, handed = Server(executor, artifact), list[OfflineCompletion]()
        for prompt, completion in zip(PROMPTS, plain, strict=True):
            server.start()
            handed.append(replace(completion, token_ids=tuple(hand_over(server, server, prompt, TOKENS))))
        server.pools.close()
        assert executor.compiles() == 0
    assert sum(sum(completion.record.accepted_per_position) for completion in drafted) > 0, "drafts are right now and then"
    checked = served.Checked(directory, "none", plan.model.config.variant.shards)
    checked.check(PROMPTS, drafted, plain)
    checked.check(PROMPTS, plain, drafted)
    checked.check(PROMPTS, handed, plain)
    assert checked.decided >= 8
