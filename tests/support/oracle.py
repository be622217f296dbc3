"""Models of transformers with random weights, of every family, and a runner that serves the same weights from poisoned pools."""

from __future__ import annotations

import copy
import functools
import json
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import MtpLayer

from npucompile.graphs import tree
from npucompile.graphs.steps.inputs import LAYER_INPUTS
from npucompile.graphs.steps.table import StepInputs
from npucompile.graphs.types import Aval, Bucket, Limits, Program, Tree
from npucompile.models import checkpoint, registry, request_slots, step
from npucompile.models.quant.declare import stored
from npucompile.models.quant.description import canonical

FULL, LINEAR = "full_attention", "linear_attention"


def limits(drafts: int) -> Limits:
    """Limits with room for a few requests."""
    return Limits(page_size=8, num_pages=41, num_slots=13, max_model_len=160, slots_per_request=drafts + 1, drafts=drafts)


LIMITS = limits(0)


def settings(kinds: str, rotary: float = 0.25, theta: float = 1e4, **sizes: Any) -> dict[str, Any]:
    """Fields of a hybrid model's config.json; `kinds` spells the layers, f for full attention and l for linear."""
    experts = sizes.get("num_experts", 0)
    return {
        "model_type": "qwen3_5_moe_text" if experts else "qwen3_5_text",
        "vocab_size": 97,
        "hidden_size": 44,
        "num_hidden_layers": len(kinds),
        "layer_types": [FULL if kind == "f" else LINEAR for kind in kinds],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": rotary},
        **({"moe_intermediate_size": 20, "shared_expert_intermediate_size": 24} if experts else {"intermediate_size": 52}),
        **sizes,
    }


def plain(layers: int, **sizes: Any) -> dict[str, Any]:
    """Fields of the config.json of a model without recurrent layers."""
    experts = sizes.get("num_experts", 0)
    return {
        "model_type": "qwen3_moe" if experts else "qwen3",
        "vocab_size": 97,
        "hidden_size": 44,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 52,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        **({"moe_intermediate_size": 20, "norm_topk_prob": True} if experts else {}),
        **sizes,
    }


def latent(layers: int, dense: int = 1, **sizes: Any) -> dict[str, Any]:
    """Fields of the config.json of a model with latent attention; the first `dense` layers have no experts."""
    return {
        "model_type": "deepseek_v3",
        "vocab_size": 97,
        "hidden_size": 44,
        "num_hidden_layers": layers,
        "first_k_dense_replace": dense,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 20,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 14,
        "intermediate_size": 52,
        "moe_intermediate_size": 20,
        "n_shared_experts": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        **sizes,
    }


def grouped(layers: int, dense: int = 1, **sizes: Any) -> dict[str, Any]:
    """The same with grouped attention in place of the latent."""
    latents = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {name: value for name, value in latent(layers, dense, **sizes).items() if name not in latents}


NEXT = {"model_type": "qwen3_next", "num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True, "intermediate_size": 36}
# With few heads scores of zero, which relu makes, would tie at the last chosen key, and implementations break ties differently.
SPARSE = {"model_type": "deepseek_v32", "index_topk": 9, "index_head_dim": 10, "index_n_heads": 20}
# Its file says nothing of the indexer's rotation, which is of pairs of channels.
GLM = {**SPARSE, "model_type": "glm_moe_dsa", "index_n_heads": 33, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5}
GLM4 = {
    "model_type": "glm4_moe", "num_key_value_heads": 2, "head_dim": 20, "attention_bias": True, "use_qk_norm": True, "n_group": 1,
    "topk_group": 1, "n_routed_experts": 10, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}  # fmt: skip
LITE = {
    "model_type": "glm4_moe_lite", "num_attention_heads": 5, "num_key_value_heads": 5, "qk_nope_head_dim": 12, "v_head_dim": 20,
    "n_routed_experts": 7, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5,
}  # fmt: skip
LATENT_YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
MINIMAX = {"model_type": "minimax_m2", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.6}}
LLAMA = {"model_type": "llama", "hidden_size": 48, "num_attention_heads": 3, "head_dim": 18}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e3, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}

# Odd sizes on purpose: head widths that are no powers of two, one or three value heads per key head, few experts.
CASES: dict[str, dict[str, Any]] = {
    "dense": settings("lllf", head_dim=18, num_attention_heads=3, num_key_value_heads=1),
    "dense-tied": settings(
        "flfl", 0.5, tie_word_embeddings=True, linear_num_key_heads=1, linear_num_value_heads=3, linear_conv_kernel_dim=2
    ),
    "dense-equal-heads": settings(
        "llf", 1.0, 1e7, num_key_value_heads=4, linear_num_value_heads=2, linear_conv_kernel_dim=3, linear_key_head_dim=10, vocab_size=61
    ),
    "moe": settings("lllf", num_experts=5, num_experts_per_tok=2),
    "moe-tied": settings(
        "lfl", 0.5, num_experts=8, num_experts_per_tok=3, tie_word_embeddings=True, linear_num_value_heads=6, linear_conv_kernel_dim=3
    ),
    "moe-one-expert": settings("fl", 1.0, num_experts=3, num_experts_per_tok=1, head_dim=6, linear_conv_kernel_dim=2, hidden_size=30),
    "next": settings("lllf", linear_num_value_heads=6, vocab_size=89, **NEXT),
    "next-raw": settings("flf", 0.5, **{**NEXT, "norm_topk_prob": False}, num_key_value_heads=1, tie_word_embeddings=True),
    "next-some-dense": settings("lllf", **NEXT, decoder_sparse_step=2, mlp_only_layers=[1], linear_num_key_heads=4),
    "plain": plain(3, head_dim=18, num_attention_heads=3, num_key_value_heads=1),
    "plain-tied": plain(2, tie_word_embeddings=True, num_key_value_heads=4, hidden_size=30),
    "plain-yarn": plain(2, rope_parameters=YARN, max_position_embeddings=128),
    "plain-moe": plain(3, num_experts=5, num_experts_per_tok=2),
    "plain-moe-raw": plain(2, num_experts=6, num_experts_per_tok=3, norm_topk_prob=False, tie_word_embeddings=True, num_key_value_heads=1),
    "plain-moe-some-dense": plain(5, num_experts=5, num_experts_per_tok=1, decoder_sparse_step=2, mlp_only_layers=[3]),
    "llama": plain(2, **LLAMA, rope_parameters=LLAMA3, tie_word_embeddings=True, num_key_value_heads=1),
    "qwen2": plain(2, model_type="qwen2", hidden_size=48, head_dim=12),
    "mixtral": plain(2, model_type="mixtral", num_local_experts=5, num_experts_per_tok=2, sliding_window=None),
    "minimax": plain(2, **MINIMAX, num_local_experts=5, num_experts_per_tok=2, head_dim=20),
    "latent": latent(3),
    "latent-yarn": latent(2, rope_parameters=LATENT_YARN, max_position_embeddings=128, n_shared_experts=2, routed_scaling_factor=1.0),
    "latent-whole-queries": latent(2, 0, q_lora_rank=None, n_group=1, topk_group=1, norm_topk_prob=False, tie_word_embeddings=True),
    "sparse": latent(2, **SPARSE),
    "sparse-yarn": latent(2, rope_parameters=LATENT_YARN, max_position_embeddings=128, **{**SPARSE, "index_topk": 5, "index_n_heads": 17}),
    "pairs": latent(3, **{**GLM, "qk_nope_head_dim": 12, "v_head_dim": 22, "n_routed_experts": 10}),
    "shared-index": latent(7, **{**GLM, "index_topk_freq": 3, "index_skip_topk_offset": 2, "index_share_for_mtp_iteration": True}),
    "shared-index-listed": latent(4, 2, **{**GLM, "indexer_types": ["full", "shared", "full", "shared"], "index_topk": 5}),
    "lite": latent(3, 1, **LITE),
    "biased": grouped(4, **GLM4),
    "biased-raw-heads": grouped(
        3, **{**GLM4, "use_qk_norm": False, "num_attention_heads": 6, "routed_scaling_factor": 1.0, "head_dim": 16}
    ),
    "equal-betas": latent(
        3,
        rope_parameters={**LATENT_YARN, "rope_theta": 5e4, "beta_fast": 1.0, "beta_slow": 1.0},
        max_position_embeddings=128,
        **{"n_routed_experts": 9, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "rms_norm_eps": 1e-5},
    ),
    "latent-all-dense": latent(2, 2, num_attention_heads=3, num_key_value_heads=3, rope_interleave=False, qk_rope_head_dim=8),
}

HYBRID = [name for name, values in CASES.items() if "layer_types" in values]
"""Cases of hybrid families, whose models have a draft head."""
DRAFTING = [
    *HYBRID,
    "latent",
    "latent-yarn",
    "latent-whole-queries",
    "sparse",
    "pairs",
    "shared-index",
    "shared-index-listed",
    "lite",
    "biased",
    "biased-raw-heads",
]
"""Cases whose models have a draft head."""


@torch.no_grad()
def draw(module: torch.nn.Module, seed: int) -> None:
    """Fills every parameter with random values that differ from defaults: norms away from 1, decays and time steps spread.

    As in a trained model, embeddings are large, decays are slow and logits span a few units; normalising a stream of almost zero
    would magnify rounding errors until they hide mistakes.
    """
    generator = torch.Generator().manual_seed(seed)
    tied = getattr(getattr(module, "config", None), "tie_word_embeddings", False)
    for name, parameter in module.named_parameters():
        leaf = name.rpartition(".")[2]
        values = torch.randn(parameter.shape, generator=generator)
        if leaf == "A_log":
            values = (torch.rand(parameter.shape, generator=generator) * 0.9 + 0.1).log()
        elif leaf == "dt_bias":
            values = torch.rand(parameter.shape, generator=generator) * 4 - 3
        elif "embed_tokens" in name:
            values = values * (0.4 if tied else 1.0)
        elif "conv1d" in name:
            values = values * 0.5
        elif parameter.ndim == 1:
            # Norms begin at the value that neither scales nor hides: 0 where the weight is zero-centred, else 1.
            low = -0.8 if tied and name == "model.norm.weight" else 0.0
            values = values * 0.3 + float(parameter.mean().round()) + low
        else:
            values = values * parameter.shape[-1] ** -0.5 * (0.6 if name == "lm_head.weight" else 1.0)
        parameter.copy_(values)
    for name, buffer in module.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.2)


@dataclass(frozen=True)
class Oracle:
    """One random model in transformers and in this project.

    Attributes:
        theirs: the transformers model, float32, eval.
        model: this project's model with the same configuration.
        weights: the same weights as a tree of float32 tensors for the family's `abstract_params`.
        values: its config.json.
        head: transformers' module of its draft head, where it has one.
    """

    theirs: Any
    model: step.Model
    weights: Tree
    values: dict[str, Any]
    head: Any = None

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """Logits of transformers after every token, without a cache: n ids -> [n, V] float32."""
        return self.theirs(torch.tensor([ids])).logits[0].float()

    @torch.no_grad()
    def logits_step_by_step(self, ids: list[int], prompt: int) -> torch.Tensor:
        """The same with its cache: `prompt` tokens at once, then token by token; [len(ids) - prompt + 1, V] float32."""
        out = self.theirs(torch.tensor([ids[:prompt]]), use_cache=True)
        rows = [out.logits[0, -1]]
        for token in ids[prompt:]:
            out = self.theirs(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
            rows.append(out.logits[0, -1])
        return torch.stack(rows).float()

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        """Random ids, never 0, which is the padding."""
        generator = torch.Generator().manual_seed(1000 * seed + length)
        return torch.randint(1, self.model.config.vocab_size, (length,), generator=generator).tolist()


@functools.cache
def case(name: str) -> Oracle:
    """The model of one of CASES."""
    return build(CASES[name])


def named(name: str) -> Oracle:
    """The model of one of CASES, or a bundled one."""
    return case(name) if name in CASES else bundled(name)


def build(values: dict[str, Any], seed: int = 0) -> Oracle:
    """A random model with these config.json fields."""
    # transformers writes into the rope_parameters that it is given.
    config = AutoConfig.for_model(**copy.deepcopy(values))
    config._attn_implementation = config._experts_implementation = "eager"
    theirs = AutoModelForCausalLM.from_config(config).eval().float()
    draw(theirs, seed)
    written = theirs.config.to_dict()
    model = registry.from_config("random", written | ({"num_nextn_predict_layers": 0} if values["model_type"] == "qwen3_next" else {}))
    params = declared(model)
    return Oracle(theirs, model, join(params, theirs.state_dict()), written)


@functools.cache
def bundled(name: str) -> Oracle:
    """A bundled model: transformers reads the directory by itself, we by our loader; both in float32."""
    entry = registry.find(name)
    theirs = AutoModelForCausalLM.from_pretrained(entry.checkpoint_dir, dtype=torch.float32, attn_implementation="eager").eval()
    params = declared(entry.model)
    return Oracle(theirs, entry.model, checkpoint.load(checkpoint.open_checkpoint(entry.checkpoint_dir), params), json.loads(entry.text))


@dataclass(frozen=True)
class HeadNames:
    """Where a family has its draft head.

    Attributes:
        field: of the configuration, the number of heads.
        prefix: begins the names of its tensors.
        parts: names of the parts of transformers' module there.
    """

    field: str
    prefix: str
    parts: dict[str, str]

    def name(self, theirs: str) -> str:
        """Name in a checkpoint of a tensor of transformers' module."""
        part, _, rest = theirs.partition(".")
        return self.prefix + ".".join(filter(None, (self.parts[part], rest)))

    @staticmethod
    def of(model: step.Model) -> HeadNames:
        """In families after DeepSeek V3 it is one more layer."""
        if not hasattr(model.config, "num_nextn_predict_layers"):
            parts = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "layers.0", "norm")
            return HeadNames("mtp_num_hidden_layers", "mtp.", dict(zip(_PARTS, parts, strict=True)))
        parts = ("enorm", "hnorm", "eh_proj", "", "shared_head.norm")
        return HeadNames(
            "num_nextn_predict_layers", f"model.layers.{len(model.config.layer_kinds)}.", dict(zip(_PARTS, parts, strict=True))
        )


_PARTS = ("enorm", "hnorm", "eh_proj", "mtp_block", "post_norm")


@functools.cache
def drafting(name: str) -> Oracle:
    """The model of that name with a draft head."""
    return with_head(named(name))


def with_head(random: Oracle) -> Oracle:
    """The same model with a draft head, which is random where the model has none."""
    places = HeadNames.of(random.model)
    model = replace(random.model, config=replace(random.model.config, **{places.field: 1}))
    backbone = type(random.theirs.model)
    modeling, kind = sys.modules[backbone.__module__], backbone.__name__.removesuffix("TextModel").removesuffix("Model")
    layer, norm = _first_of(getattr(modeling, f"{kind}DecoderLayer")), getattr(modeling, f"{kind}RMSNorm")
    kinds = model.config.layer_kinds
    # Where transformers lists the kinds of layers there is none behind the last.
    behind = len(kinds) - hasattr(random.theirs.config, "mlp_layer_types")
    own = copy.deepcopy(random.theirs.config)
    if hasattr(own, "indexer_types"):
        # A head has an indexer of its own, whatever the last layer has.
        own.indexer_types = ["full"] * len(kinds)
    head = MtpLayer(own, layer, norm, kinds.index(FULL) if FULL in kinds else behind).eval()
    names = {name: places.name(name) for name in head.state_dict()}
    params, weights = declared(model)["mtp"], random.weights
    if "mtp" in weights:
        ours = split(params, weights["mtp"])
        head.load_state_dict({name: ours[called] for name, called in names.items()})
    else:
        draw(head, 7)
        weights = {**weights, "mtp": join(params, {names[name]: tensor for name, tensor in head.state_dict().items()})}
    return replace(random, model=model, weights=weights, head=head)


def _first_of(layer: Any) -> Any:
    """The class of a layer that returns hidden states alone, where transformers' own returns more."""
    forward = layer.forward

    def first(*args: Any, **options: Any) -> torch.Tensor:
        out = forward(*args, **options)
        return out[0] if isinstance(out, tuple) else out

    return type(layer.__name__, (layer,), {"forward": first})


def declared(model: step.Model) -> Tree:
    """All parameters of a model, with the biases that its matrices have."""
    return stored(model.family.abstract_params(model.config, torch.float32), model.config.variant)


def join(params: Tree, state_dict: dict[str, torch.Tensor]) -> Tree:
    """Tensors for a tree of Param, from a state dict with the checkpoint's names."""
    state_dict = {canonical(name): tensor for name, tensor in state_dict.items()}
    return tree.map_leaves(lambda p: p.source.join(*(state_dict[name] for name in p.source.names)).contiguous(), params)


def split(params: Tree, tensors: Tree) -> dict[str, torch.Tensor]:
    """The inverse of join."""
    pairs = zip(tree.flatten(params), tree.flatten(tensors), strict=True)
    return {name: part for (_, p), (_, t) in pairs for name, part in zip(p.source.names, p.source.split(t), strict=True)}


def cast(tensors: Tree, params: Tree) -> Tree:
    """Tensors in the dtypes of their Param."""
    return tree.map_leaves(lambda tensor, param: tensor.to(param.aval.dtype), tensors, params)


def poisoned(avals: Tree) -> Tree:
    """Pools full of NaN, and request slots full of impossible tokens and positions, except the null request slot."""

    def fill(aval: Aval) -> torch.Tensor:
        if aval.dtype.is_floating_point:
            return torch.full(aval.shape, float("nan"), dtype=aval.dtype)
        pool = torch.full(aval.shape, max(-(10**6), torch.iinfo(aval.dtype).min), dtype=aval.dtype)
        pool[0] = 0
        return pool

    return tree.map_leaves(fill, avals)


@dataclass(frozen=True)
class Row:
    """One row of a step: the request's new tokens, and its pages and state slots."""

    tokens: list[int]
    start: int
    pages: list[int]
    read: int = 0
    write: list[int] = field(default_factory=lambda: [0])


PADDING = Row([], 3, [], 0, [0])
"""A padding row: its inputs continue from the null slot and the null page, which hold NaN."""


def inputs(bucket: Bucket, rows: list[Row], limits: Limits = LIMITS, junk: int = 0) -> dict[str, torch.Tensor]:
    """Inputs of a step's layers; rows beyond those given are PADDING, with `junk` for tokens."""
    B, out = bucket.batch, StepInputs(bucket, limits).padding(LAYER_INPUTS)
    out["tokens"].fill_(junk)
    for b, row in enumerate([*rows, *[PADDING] * (B - len(rows))]):
        out["tokens"][b, : len(row.tokens)] = torch.tensor(row.tokens, dtype=torch.int32)
        out["num_computed_tokens"][b], out["query_lens"][b], out["state_slots_in"][b] = row.start, len(row.tokens), row.read
        out["page_table"][b, : len(row.pages)] = torch.tensor(row.pages, dtype=torch.int32)
        out["state_slots_out"][b, : len(row.write)] = torch.tensor(row.write, dtype=torch.int32)
    return out


def blank(program: Program) -> dict[str, torch.Tensor]:
    """Inputs of a program whose rows are all padding, with NaN for floats."""
    fill = {torch.float32: float("nan"), torch.int32: 0}
    return {name: torch.full(aval.shape, fill[aval.dtype], dtype=aval.dtype) for name, aval in program.inputs.items()}


class Runner:
    """Runs the programs of a model over one set of pools, which start as NaN; every row is greedy.

    Args:
        drafts: k; a decode step verifies the tokens of the row, whatever was drafted.
    """

    def __init__(self, model: step.Model, weights: Tree, dtype: torch.dtype = torch.float32, drafts: int = 0) -> None:
        self.model, self.limits, self.dtype = replace(model, drafting=drafts > 0), limits(drafts), dtype
        self.weights = cast({key: weights[key] for key in self.model.params(dtype)}, self.model.params(dtype))
        self.state = poisoned(self.model.state(self.limits, dtype))

    def step(self, bucket: Bucket, rows: list[Row], junk: int = 0, **options: Any) -> dict[str, torch.Tensor]:
        """Outputs of the live rows; the pools advance. The request of row b has request slot b + 1.

        Args:
            junk: tokens of padding, and of a row beyond its own.
            options: of `step.program`.
        """
        program = step.program(self.model, bucket, self.limits, self.dtype, **options)
        read = inputs(bucket, rows, self.limits, junk)
        operands = {**blank(program), **{name: tensor for name, tensor in read.items() if name in program.inputs}}
        live = slice(len(rows))
        operands["request_slots"][live] = torch.arange(1, len(rows) + 1)
        for name, value in {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "uniform": 0.5}.items():
            operands[name][live] = value
        if bucket.kind == "decode":
            operands["drafts"][live], operands["base"][live] = read["query_lens"][live] - 1, read["num_computed_tokens"][live]
            self._fill_request_slots(rows, read, junk)
        elif self.limits.drafts:
            operands["next_tokens"][live] = -1
        outputs, self.state = program.forward(self.weights, self.state, operands)
        return {name: tensor[live] for name, tensor in outputs.items()}

    def _fill_request_slots(self, rows: list[Row], read: dict[str, torch.Tensor], junk: int) -> None:
        """Writes the rows' tokens, positions and state slots to their request slots, and PADDING's to the null request slot."""
        pool = torch.zeros_like(self.state["request_slots"])
        pool[0, request_slots.START], pool[0, request_slots.TOKENS :] = PADDING.start, junk
        for b, row in enumerate(rows):
            pool[b + 1, request_slots.START], pool[b + 1, request_slots.ACCEPTED] = row.start, row.write.index(row.read)
            pool[b + 1, request_slots.TOKENS :] = read["tokens"][b]
        self.state = {**self.state, "request_slots": pool}

    def prefill(self, ids: list[int], pages: list[int], slot: int, chunks: list[int], junk: int = 0) -> torch.Tensor:
        """Runs a prompt through prefill buckets of these sizes, the last one padded; returns the logits [V] after the prompt."""
        done, logits = 0, torch.empty(0)
        for size in chunks:
            part = ids[done : done + size]
            logits = self.step(Bucket("prefill", 1, size), [Row(part, done, pages, slot, [slot])], junk)["logits"]
            done += len(part)
        assert done == len(ids), "the chunks cover the prompt"
        return logits[0, 0]


class DraftRun:
    """A model's draft head, as MtpLayer and as `DraftHead` on poisoned pools."""

    def __init__(self, name: str) -> None:
        self.random = drafting(name)
        self.config, self.weights, self.theirs = self.random.model.config, self.random.weights, self.random.head
        self.state = poisoned(self.random.model.family.abstract_state(self.config, LIMITS, torch.float32))

    def reference(self, ids: list[int], hidden: torch.Tensor, chosen: torch.Tensor | None = None) -> tuple[torch.Tensor, Any]:
        """[n, M] of the draft layer over ids[i] beside hidden[i], at the positions of the ids: i + 1, as transformers counts; and the keys
        that the last token reads of an indexer's choice, `chosen` if given."""
        read: list[torch.Tensor] = []

        def choose(indexer: Any, operands: Any, keys: torch.Tensor) -> torch.Tensor:
            if chosen is not None:
                keys[0, -1] = chosen[torch.arange(keys.shape[-1]).clamp(max=len(chosen) - 1)]
            read.append(keys[0, -1])
            return keys

        indexer = getattr(getattr(self.theirs.mtp_block, "self_attn", None), "indexer", None)
        hook = indexer.register_forward_hook(choose) if indexer is not None else None
        model, n = self.random.theirs.model, len(ids)
        embeds = model.embed_tokens(torch.tensor([ids]))
        positions = torch.arange(1, n + 1)[None]
        mask = torch.full((n, n), -torch.inf).triu(1)[None, None]
        angles = model.rotary_emb(embeds, positions)
        out = self.theirs(embeds, hidden[None], angles, mask, positions, None)[0]
        if hook is not None:
            hook.remove()
        return out, read[0] if read else None

    def run(self, bucket: Bucket, rows: list[Row], hidden: torch.Tensor, passed: Tree) -> torch.Tensor:
        """Hidden states [B, Q, M] of our draft head for all rows of a bucket, which also extend its cache.

        Args:
            passed: inputs that an earlier draft passed on.
        """
        read, head = {**inputs(bucket, rows), **passed}, self.random.model.family.draft_head
        fused, self.state = head.extend_cache(self.config, self.weights, self.state, read, hidden, first=bucket.q_len > 1)
        drafted = head.draft(self.config, self.weights, self.state, read, fused)
        hidden, self.passed = drafted if isinstance(drafted, tuple) else (drafted, {})
        return hidden.view(bucket.batch, bucket.q_len, -1)

    def check_recursion(self, tolerance: float) -> None:
        """Two prompts in a padded prefill; then three draft steps, each fed the hidden state and the token of the one before."""
        prompts = [self.random.prompt(12, 1), self.random.prompt(7, 2)]
        hiddens = [self.random.theirs.model(torch.tensor([ids])).last_hidden_state[0] for ids in prompts]
        shifted = [[*ids[1:], 3 + i] for i, ids in enumerate(prompts)]
        pages = [[4, 2], [9, 1]]
        fed = torch.full((3, 12, self.config.hidden_size), float("nan"))
        for b, hidden in enumerate(hiddens):
            fed[b, : len(hidden)] = hidden
        rows = [Row(ids, 0, pages[b]) for b, ids in enumerate(shifted)]
        out = self.run(Bucket("prefill", 3, 12), rows, fed.flatten(0, 1), {})
        expected = [self.reference(ids, hidden)[0] for ids, hidden in zip(shifted, hiddens, strict=True)]
        for b, want in enumerate(expected):
            assert (out[b, : len(want)] - want).abs().max() < tolerance
        passed: Tree = {}
        chosen: list[Any] = [None, None]
        for token in (11, 19, 2):
            last = torch.stack([*(want[-1] for want in expected), torch.full_like(fed[0, 0], float("nan"))])
            rows = [Row([token + b], len(shifted[b]), pages[b]) for b in range(2)]
            out = self.run(Bucket("decode", 3, 1), rows, last, passed)
            passed = passed or self.passed
            for b in range(2):
                shifted[b], hiddens[b] = [*shifted[b], token + b], torch.cat([hiddens[b], expected[b][-1:]])
                expected[b], keys = self.reference(shifted[b], hiddens[b], chosen[b])
                chosen[b] = keys if passed else None
                assert (out[b, 0] - expected[b][-1]).abs().max() < tolerance

    def check_sources(self) -> None:
        """The parameters' sources are every tensor of transformers' module, under the checkpoint's names."""
        places, params = HeadNames.of(self.random.model), declared(self.random.model)["mtp"]
        sizes = {name: shape for _, p in tree.flatten(params) for name, shape in zip(p.source.names, p.source.shapes, strict=True)}
        assert sizes == {places.name(name): tuple(tensor.shape) for name, tensor in self.theirs.state_dict().items()}
