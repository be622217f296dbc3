"""Configuration, initial parameters and training losses of the bundled model, whose functions are those that are compiled and served."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from ....graphs import tree
from ....graphs.steps.inputs import LAYER_INPUTS
from ....graphs.steps.prefill import PREFILL
from ....graphs.steps.table import StepInputs
from ....graphs.types import Limits, Tree
from ....models import decoder, hybrid
from ....models import params as parameters
from .tiny_tokenizer import VOCAB_SIZE

NAME = "qwen3.5-tiny"
MAX_LENGTH = 2048


def hf_config(eos_id: int) -> dict[str, Any]:
    """The config.json of the bundled model: few layers, heads and experts, but every kind of block."""
    return {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 96,
        "mtp_num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": MAX_LENGTH,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        "pad_token_id": eos_id,
    }


def initial_params(cfg: hybrid.Config, seed: int) -> Tree:
    """Tree of f32 tensors to start training from.

    The declared initialisation, except: projections into the residual stream are scaled down by sqrt(2 * layers), and the
    decay of each DeltaNet head starts as in the public Mamba-2 and DeltaNet code (A in [1, 16], time step in [0.001, 0.1]), so
    that heads begin with memories of ten to a thousand tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = parameters.initialise(hybrid.abstract_params(cfg, torch.float32), generator)
    shrink = (2 * len(cfg.layer_types)) ** -0.5

    def adjust(path: str, value: torch.Tensor) -> torch.Tensor:
        leaf = path.rsplit(".", 1)[-1]
        if leaf == "a_log":
            return torch.empty_like(value).uniform_(1, 16, generator=generator).log()
        if leaf == "dt_bias":
            low, high = math.log(0.001), math.log(0.1)
            step = torch.empty_like(value).uniform_(low, high, generator=generator).exp()
            return step + (-torch.expm1(-step)).log()
        return value * shrink if leaf in ("out", "down", "shared_down") else value

    return tree.unflatten(drawn, [adjust(path, value) for path, value in tree.flatten(drawn)])


@dataclass(frozen=True)
class StepArguments:
    """Empty state and inputs, except the tokens, of a step over sequences from their first token on."""

    state: Tree
    inputs: dict[str, torch.Tensor]


def fresh_step(cfg: hybrid.Config, rows: int, length: int, spare_pages: int = 0) -> StepArguments:
    """Row b owns state slot b+1 and the pages (of one token each) b*length+1 .. (b+1)*length.

    Args:
        spare_pages: pages that no row owns, after those.
    """
    limits = Limits(page_size=1, num_pages=rows * length + 1 + spare_pages, num_slots=rows + 1, max_model_len=length)
    avals = hybrid.abstract_state(cfg, limits, torch.float32)
    inputs = StepInputs(PREFILL.bucket(rows, length), limits).padding(LAYER_INPUTS)
    inputs["query_lens"].fill_(length)
    inputs["page_table"].copy_(torch.arange(1, rows * length + 1).view(rows, length))
    inputs["state_slots_in"].copy_(torch.arange(1, rows + 1))
    inputs["state_slots_out"].copy_(inputs["state_slots_in"][:, None])
    return StepArguments(tree.map_leaves(lambda aval: torch.zeros(aval.shape, dtype=aval.dtype), avals), inputs)


def balance_loss(routers: list[torch.Tensor], experts_per_token: int) -> torch.Tensor:
    """Mean over layers of `E * sum_e share_e * probability_e` (arXiv:2101.03961): 1 when experts are used evenly.

    Args:
        routers: logits [T, E] of each layer.
    """
    losses = []
    for logits in routers:
        probability = torch.softmax(logits, -1)
        chosen = torch.zeros_like(probability).scatter_(1, probability.topk(experts_per_token, -1).indices, 1.0 / experts_per_token)
        losses.append(logits.shape[-1] * (chosen.mean(0) * probability.mean(0)).sum())
    return torch.stack(losses).mean()


@dataclass(frozen=True)
class Losses:
    """Mean losses of a batch in nats: next token, the token after it from the draft head, and expert balance."""

    main: torch.Tensor
    draft: torch.Tensor
    balance: torch.Tensor


def joint_losses(cfg: hybrid.Config, params: Tree, windows: torch.Tensor, with_draft: bool) -> Losses:
    """Losses over windows [B, Q+2]; without the draft head its loss is 0.

    Row t of the draft head pairs the hidden state of token t with token t+1 and predicts token t+2.
    """
    rows, length = windows.shape[0], windows.shape[1] - 2
    step = fresh_step(cfg, rows, length)
    ids = windows.to(torch.int32)
    hidden, state, intermediates = hybrid.forward(cfg, params, step.state, {**step.inputs, "tokens": ids[:, :-2]})
    main = cross_entropy(decoder.head(cfg, params, hidden), windows[:, 1:-1].flatten())
    draft = torch.zeros(())
    if with_draft:
        shifted = {**step.inputs, "tokens": ids[:, 1:-1]}
        taken, state = hybrid.extend_draft_cache(cfg, params, state, shifted, hidden, first=True)
        ahead = hybrid.draft(cfg, params, state, shifted, taken)
        draft = cross_entropy(decoder.head(cfg, params, ahead), windows[:, 2:].flatten())
    return Losses(main, draft, balance_loss(intermediates.routers, cfg.num_experts_per_tok))
