"""Small models with random weights, hybrid ones with a draft head, run on one device and on all ranks of a mesh in this process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule

from npucompile.graphs import tree
from npucompile.graphs.passes.optimise import optimise
from npucompile.graphs.spmd.partition import PartitionedProgram, partition
from npucompile.graphs.steps.table import StepInputs
from npucompile.graphs.types import Bucket, Limits, Mesh, Rules, Tree
from npucompile.lowering.ascend.emulator.interpreter import Interpreter
from npucompile.models import (
    attention,
    deepseek_v3,
    deepseek_v32,
    draft_source,
    expert_placement,
    glm4_moe,
    glm_moe_dsa,
    hybrid,
    qwen3,
    qwen3_5,
    qwen3_next,
    request_slots,
    sharding_rules,
    step,
)
from npucompile.models.checkpoint import found_names
from npucompile.models.params import initialise
from npucompile.models.quant.declare import EXPERT_FORMATS
from npucompile.models.quant.formats import Formats
from npucompile.models.quant.recipes import formats_of_scheme
from npucompile.models.rotary import Rotary
from npucompile.models.routing import SIGMOID
from npucompile.models.variant import PLAIN, Variant

F32 = torch.float32
ROWS, PAGES, VOCAB = 4, 8, 40
MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
DENSE = {"intermediate_size": 32}

Inputs = dict[str, torch.Tensor]


def limits(drafts: int) -> Limits:
    """Room for four requests of 32 tokens in a group."""
    return Limits(4, 1 + ROWS * PAGES, 1 + ROWS * (drafts + 1), 4 * PAGES, drafts + 1, drafts)


LIMITS = limits(0)


NO_SHARED = {name: size for name, size in MOE.items() if name[:6] != "shared"}
PLAIN_MODELS: dict[str, dict[str, Any]] = {
    "plain": {"layer_kinds": (qwen3.DENSE,) * 2},
    "plain-odd": {"layer_kinds": (qwen3.DENSE,) * 2, "vocab_size": 41, "intermediate_size": 31},
    "plain-biased": {"layer_kinds": (qwen3.DENSE,) * 2, "head_norms": attention.NONE, "biased": True},
    "plain-across": {"layer_kinds": (qwen3.MOE,) * 2, "head_norms": attention.ALL, "routing_kind": SIGMOID, **NO_SHARED},
    "plain-moe": {"layer_kinds": (qwen3.MOE, qwen3.DENSE, qwen3.MOE), **NO_SHARED},
}
"""Models without recurrent layers or a draft head, by name."""

EAGLE3 = "-eagle3"
"""What the names of those with a draft head of a second checkpoint end with; it has one key-value head, and they have two."""

_HEAD = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "vocab_size": VOCAB,
    "draft_vocab_size": 16,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1]},
}


@functools.cache
def config(experts: bool = True, fused_projections: bool = False) -> hybrid.Config:
    """Four layers, one of them full attention, and a draft head; sizes that four devices split, two key-value heads."""
    sizes: dict[str, Any] = MOE if experts else DENSE
    return hybrid.Config(
        vocab_size=VOCAB,
        hidden_size=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=8,
        layer_types=("linear_attention", "full_attention", "linear_attention", "linear_attention"),
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_conv_kernel_dim=4,
        rotary=Rotary(4, 1e4),
        rms_norm_eps=1e-6,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        mtp_num_hidden_layers=1,
        fused_projections=fused_projections,
        **sizes,
    )


@functools.cache
def plain_config(name: str) -> qwen3.Config:
    """One of PLAIN_MODELS; the weights of its experts are not renormalised, and its embeddings are tied."""
    return qwen3.Config(
        hidden_size=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=8,
        rotary=Rotary(8, 1e4),
        rms_norm_eps=1e-6,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        norm_topk_prob=False,
        **{"vocab_size": VOCAB, **DENSE, **PLAIN_MODELS[name]},
    )


@functools.cache
def latent_config() -> deepseek_v3.Config:
    """Latent attention, a layer without experts, experts of which a token chooses three from two of four groups, and a draft head."""
    return deepseek_v3.Config(
        vocab_size=VOCAB,
        hidden_size=24,
        num_attention_heads=8,
        q_lora_rank=16,
        kv_lora_rank=12,
        qk_nope_head_dim=6,
        qk_rope_head_dim=4,
        v_head_dim=10,
        layer_kinds=(deepseek_v3.DENSE, deepseek_v3.MOE, deepseek_v3.MOE),
        rotary=Rotary(4, 1e4),
        rms_norm_eps=1e-6,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=8,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
        num_nextn_predict_layers=1,
        **DENSE,
    )


@functools.cache
def sparse_config() -> deepseek_v32.Config:
    """The same, whose attention reads the best five keys; with many heads, as scores of zero would tie (oracle.py)."""
    return deepseek_v32.Config(**vars(latent_config()), index_n_heads=24, index_head_dim=8, index_topk=5)


@functools.cache
def shared_index_config() -> glm_moe_dsa.Config:
    """The same of four layers, of which the second and the last read what the one before them chose, as later drafts do of the first."""
    kinds = (deepseek_v3.DENSE, "moe_shared", deepseek_v3.MOE, "moe_shared")
    return glm_moe_dsa.Config(
        **{**vars(sparse_config()), "layer_kinds": kinds, "indexer_rope_interleave": True, "index_share_for_mtp_iteration": True}
    )


@functools.cache
def biased_config() -> glm4_moe.Config:
    """The sizes of the latent model with grouped attention, whose projections add biases and whose heads are rotated in part."""
    latents = {name: value for name, value in vars(latent_config()).items() if name not in deepseek_v3.Config.__annotations__}
    return glm4_moe.Config(
        **{**latents, "rotary": Rotary(4, 1e4)}, num_key_value_heads=2, head_dim=8, attention_bias=True, use_qk_norm=True
    )


def model(variant: Variant = PLAIN, *, experts: bool = True, name: str = "small", drafts: int = 0) -> step.Model:
    """A small model: of Qwen3.5 with or without experts, "odd" of sizes that ranks cannot share evenly, or "next", "latent", "sparse",
    "shared-index", "biased" or one of PLAIN_MODELS."""
    if name == "latent":
        return step.Model(name, deepseek_v3.FAMILY, replace(latent_config(), variant=variant), drafting=drafts > 0)
    if name == "sparse":
        return step.Model(name, deepseek_v32.FAMILY, replace(sparse_config(), variant=variant), drafting=drafts > 0)
    if name == "shared-index":
        return step.Model(name, glm_moe_dsa.FAMILY, replace(shared_index_config(), variant=variant), drafting=drafts > 0)
    if name == "biased":
        return step.Model(name, glm4_moe.FAMILY, replace(biased_config(), variant=variant), drafting=drafts > 0)
    if name.removesuffix(EAGLE3) in PLAIN_MODELS:
        plain = step.Model(name, qwen3.FAMILY, plain_config(name.removesuffix(EAGLE3)), drafting=drafts > 0)
        if name.endswith(EAGLE3):
            odd = {"draft_vocab_size": 13, "intermediate_size": 29} if "odd" in name else {}
            plain = draft_source.attached(plain, {**_HEAD, **odd, "vocab_size": plain.config.vocab_size}, ("d2t",))
        return replace(plain, config=replace(plain.config, variant=variant))
    if name == "odd":
        sizes = replace(config(experts=False), vocab_size=43, intermediate_size=31, variant=variant)
        return step.Model(name, qwen3_5.FAMILY, sizes, drafting=drafts > 0)
    family = qwen3_next.FAMILY if name == "next" else qwen3_5.FAMILY
    return step.Model(name, family, replace(config(experts, name == "next"), variant=variant), drafting=drafts > 0)


@functools.cache
def tensors(experts: bool = True, name: str = "small") -> Mapping[str, torch.Tensor]:
    """A checkpoint in memory: tensors by the names of their sources."""
    checkpoint: dict[str, torch.Tensor] = {}
    params = replace(model(experts=experts, name=name), drafting=True).params(F32)
    head = {hybrid.DRAFT: params.pop(hybrid.DRAFT)} if hybrid.DRAFT in params else {}
    for part, seed in ((params, 10), (head, 6)):
        generator = torch.Generator().manual_seed(seed)
        for (_, param), (_, drawn) in zip(tree.flatten(part), tree.flatten(initialise(part, generator)), strict=True):
            # Noise on initial zeros and ones, so that a dropped parameter would change the logits.
            # The draft head's ids stay those of every other token.
            noisy = drawn + 0.2 * torch.randn(drawn.shape, generator=generator) if drawn.is_floating_point() else 2 * drawn
            checkpoint.update(zip(param.source.names, param.source.split(noisy), strict=True))
    return checkpoint


def quantised(scheme: str, shards: Mapping[str, int] | None = None, **changes: Any) -> Variant:
    """The variant of a scheme of the largest model; `shards` as in `Variant.shards`."""
    return Variant(formats=formats_of_scheme(scheme, "qwen3.5-397b"), grouped=True, shards=tuple((shards or {}).items()), **changes)


def everywhere(form: str, **shards: int) -> Variant:
    """All matrices of layers in one format, but experts, which have no static one; int4 scales are of groups of four. In int8 the head,
    too: these have too few tokens to share packed int4."""
    experts = form if form in EXPERT_FORMATS else "w8a8_dynamic"
    layers = (("*_proj", form), ("*.in_proj_qkv", form), ("*.in_proj_z", form), ("mtp.layers.*_proj", form))
    rules = (("*.experts.*", experts), *layers, *((("lm_head", form),) if form.startswith("w8") else ()))
    return Variant(formats=Formats(rules, group=4), grouped=True, shards=tuple(shards.items()))


def mixed(**shards: int) -> Variant:
    """Different formats in every matrix that is joined of several."""
    w8, static = "w8a8_dynamic", "w8a8"
    forms = {"q_proj": w8, "v_proj": static, "up_proj": w8, "in_proj_qkv": w8, "in_proj_z": static, "kv_a_proj_with_mqa": w8, "o_proj": w8}
    rules = (("*.experts.*", w8), *((f"*.{name}", form) for name, form in forms.items()))
    return Variant(formats=Formats(rules), grouped=True, shards=tuple(shards.items()))


OTHERS: dict[str, Mapping[str, torch.Tensor]] = {}
"""Checkpoints of models that are not of this file, by their names."""


def weights(model: step.Model) -> Tree:
    """The model's parameters, in the form that its variant holds them in."""
    checkpoint = OTHERS[model.name] if model.name in OTHERS else tensors(model.config.num_experts > 0, model.name)
    return tree.map_leaves(lambda p: p.whole(*(checkpoint[n] for n in found_names(p.source, checkpoint))).contiguous(), model.params(F32))


class OneDevice:
    """One group served by one device, by calling the untraced program."""

    def __init__(self, model: step.Model, drafts: int = 0, picture_rows: int = 0) -> None:
        self.limits = replace(limits(drafts), picture_rows=picture_rows)
        self.model = replace(model, drafting=drafts > 0)
        self.weights = weights(self.model)
        self.state = tree.map_leaves(lambda aval: torch.zeros(aval.shape, dtype=aval.dtype), self.model.state(self.limits, F32))

    @torch.no_grad()
    def step(self, bucket: Bucket, inputs: Mapping[str, torch.Tensor]) -> Inputs:
        program = step.program(self.model, bucket, self.limits, F32)
        outputs, self.state = program.forward(self.weights, self.state, inputs)
        return outputs

    def pool(self) -> list[torch.Tensor]:
        """The pools, in the order of the signature."""
        return [tensor for _, tensor in tree.flatten(self.state)]


Form = Callable[[PartitionedProgram], Any]
Machine = Callable[[Any, Mesh], Callable[[Sequence[Sequence[torch.Tensor]]], list[list[torch.Tensor]]]]


@functools.cache
def partitioned(
    model: step.Model, mesh: Mesh, rules: Rules, bucket: Bucket, limits: Limits, emit_logits: bool, max_logprobs: int
) -> PartitionedProgram:
    program = step.program(model, bucket, limits, F32, emit_logits=emit_logits, max_logprobs=max_logprobs)
    return optimise(partition(program, mesh, rules))


def functional(partitioned: PartitionedProgram) -> GraphModule:
    return partitioned.graph


@dataclass
class Fleet:
    """All ranks of a mesh, each with its shard of everything, one step at a time.

    Attributes:
        form: turns a partitioned graph into the form to run; a form that returns no new state writes it in place.
        machine: runs that form: an `Interpreter`, or devices.
        drafts: k.
        picture_rows: R.
        state: by rank, pools in the order of the signature.
    """

    model: step.Model
    mesh: Mesh
    expert_parallel: bool = True
    form: Form = functional
    machine: Machine = Interpreter
    emit_logits: bool = True
    drafts: int = 0
    max_logprobs: int = 0
    picture_rows: int = 0
    state: list[list[torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rules, ranks = self.rules(1), range(self.mesh.size)
        self.limits = replace(limits(self.drafts), picture_rows=self.picture_rows)
        self.model = replace(self.model, drafting=self.drafts > 0)
        flat = [tensor for _, tensor in tree.flatten(weights(self.model))]
        avals = [param.aval for _, param in tree.flatten(self.model.params(F32))]
        self.params = [[t[rules.local_slice(a, self.mesh, rank)].clone() for t, a in zip(flat, avals, strict=True)] for rank in ranks]
        self.names, self.pools = zip(*tree.flatten(self.model.state(self.limits, F32)), strict=True)
        empty = [torch.zeros(aval.shape, dtype=aval.dtype) for aval in self.pools]
        cut = [[t[rules.local_slice(a, self.mesh, rank)].clone() for t, a in zip(empty, self.pools, strict=True)] for rank in ranks]
        self.state = cut
        self.graphs: dict[Bucket, Any] = {}

    def rules(self, tokens: int, *, chunks: bool = False) -> Rules:
        experts, sliced = expert_placement.count(self.model.config), self.model.config.variant.sliced
        return sharding_rules.rules(
            self.mesh, experts=experts, expert_parallel=self.expert_parallel, tokens=tokens, sliced=sliced, chunks=chunks
        )

    def partitioned(self, bucket: Bucket) -> PartitionedProgram:
        model = replace(self.model, placement=None)  # Graphs are of any.
        rules = self.rules(bucket.tokens, chunks=bucket.kind == "prefill")
        return partitioned(model, self.mesh, rules, bucket, self.limits, self.emit_logits, self.max_logprobs)

    def step(self, bucket: Bucket, inputs: Sequence[Mapping[str, torch.Tensor]]) -> list[Inputs]:
        """Outputs of every group, from the inputs of every group; all ranks of a group must agree."""
        program = self.partitioned(bucket)
        if bucket not in self.graphs:
            self.graphs[bucket] = self.machine(self.form(program), self.mesh)
        names = [leaf.path for leaf in program.signature.outputs]
        operands = []
        for rank in range(self.mesh.size):
            mine = {**inputs[self.mesh.coordinates(rank)["dp"]], "coords": self.mesh.coords(rank)}
            own = [mine[leaf.path].clone() for leaf in program.signature.inputs]
            operands.append([*self.params[rank], *self.state[rank], *own])
        results = self.graphs[bucket](operands)
        outputs = []
        for rank, values in enumerate(results):
            if len(values) > len(names):
                self.state[rank] = values[len(names) :]
            outputs.append(dict(zip(names, values[: len(names)], strict=True)))
        share = self.mesh.axis("tp")
        for rank, own in enumerate(outputs):
            for name, value in own.items():
                first = outputs[rank - rank % share][name]
                # Outputs of padding may be NaN.
                assert torch.equal(value.nan_to_num(0.25), first.nan_to_num(0.25)), f"rank {rank} has other {name} than its group"
        return outputs[::share]

    def pool(self, group: int) -> list[torch.Tensor]:
        """The pools of one group, assembled from the shards of its ranks."""
        share, rules = self.mesh.axis("tp"), self.rules(1)
        whole = [torch.empty(aval.shape, dtype=aval.dtype) for aval in self.pools]
        for rank in range(group * share, (group + 1) * share):
            for tensor, aval, part in zip(whole, self.pools, self.state[rank], strict=True):
                tensor[rules.local_slice(aval, self.mesh, rank)] = part
        return whole

    def request_slots(self, group: int) -> list[torch.Tensor]:
        """The pool of request slots of each rank of a group; they are replicas."""
        share = self.mesh.axis("tp")
        return [self.state[rank][self.names.index("request_slots")] for rank in range(group * share, (group + 1) * share)]


def prompts(group: int, batch: int) -> list[list[int]]:
    """Requests of one group; lengths and ids differ between rows and groups. Longer than a page, at most 7."""
    generator = torch.Generator().manual_seed(100 + group)
    return [torch.randint(1, VOCAB, (7 - (group + b) % 4,), generator=generator).tolist() for b in range(batch)]


class Serving:
    """Requests of several groups: two prefill chunks each, then greedy steps that verify drafts and make new ones.

    Attributes:
        live: how many rows of each group hold a request.
        output: by group and row, tokens generated so far.
    """

    def __init__(self, batch: int, drafts: int, live: Sequence[int], chunk: int = 5) -> None:
        self.prefill, self.decode = Bucket("prefill", batch, chunk), Bucket("decode", batch, drafts + 1)
        self.live, self.drafts, self.turn = list(live), drafts, 0
        self.prompts = [prompts(group, rows) for group, rows in enumerate(live)]
        self.output: list[list[list[int]]] = [[[] for _ in range(rows)] for rows in live]

    def steps(self, decodes: int) -> Iterator[tuple[Bucket, list[Inputs]]]:
        """Inputs of the groups for each prefill step and so many decode steps; each is to be followed by `commit`."""
        Q = self.prefill.q_len
        for at in range(0, 7, Q):
            yield self.prefill, [self._chunk(group, at, at + Q) for group in range(len(self.live))]
        for _ in range(decodes):
            self.turn += 1
            yield self.decode, [self._candidates(group) for group in range(len(self.live))]

    def _chunk(self, group: int, first: int, last: int) -> Inputs:
        inputs = self._inputs(self.prefill)
        for b, ids in enumerate(self.prompts[group]):
            if part := ids[first:last]:
                inputs["tokens"][b, : len(part)] = torch.tensor(part)
                inputs["num_computed_tokens"][b], inputs["query_lens"][b], inputs["state_slots_in"][b] = first, len(part), self._slots(b)[0]
                self._place(inputs, b, self._slots(b)[:1])
                if self.drafts:
                    inputs["next_tokens"][b] = ids[last] if len(ids) > last else -1
        return inputs

    def _candidates(self, group: int) -> Inputs:
        """Inputs of a decode step; now and then one draft of a row is not verified."""
        inputs = self._inputs(self.decode)
        for b, row in enumerate(self.output[group]):
            inputs["base"][b] = len(self.prompts[group][b]) + len(row) - 1
            inputs["drafts"][b] = max(0, self.drafts - ((self.turn + b) % 4 == 2))
            self._place(inputs, b, self._slots(b))
        return inputs

    def commit(self, bucket: Bucket, inputs: Sequence[Inputs], outputs: Sequence[Inputs]) -> None:
        """Appends the tokens that each group sampled."""
        for group, sampled in enumerate(outputs):
            for b, row in enumerate(self.output[group]):
                if bucket.kind == "decode":
                    row += sampled["tokens"][b, : int(sampled["counts"][b])].tolist()
                elif int(inputs[group]["num_computed_tokens"][b] + inputs[group]["query_lens"][b]) == len(self.prompts[group][b]):
                    row.append(int(sampled["tokens"][b, 0]))

    def force(self, group: int, pool: torch.Tensor, truth: Sequence[Sequence[int]]) -> list[int | None]:
        """Overwrites drafts in the request slots of a group: a number of right ones that varies by step and row, then wrong ones.

        Args:
            truth: all tokens that each row will generate.

        Returns:
            number of right drafts of each row; None where the model's own drafts were left.
        """
        right: list[int | None] = []
        for b, row in enumerate(self.output[group]):
            count, ahead = (self.turn + b + group) % (self.drafts + 2), truth[b][len(row) : len(row) + self.drafts]
            right.append(count if count <= self.drafts else None)
            if count <= self.drafts:
                wrong = [(token + 1) % VOCAB for token in ahead[count:]]
                pool[1 + b, request_slots.TOKENS + 1 :] = torch.tensor([*ahead[:count], *wrong], dtype=torch.int32)
        return right

    def _slots(self, b: int) -> list[int]:
        Q = self.drafts + 1
        return [1 + Q * b + i for i in range(Q)]

    def _place(self, inputs: Inputs, b: int, slots: Sequence[int]) -> None:
        inputs["request_slots"][b] = 1 + b
        inputs["page_table"][b] = torch.tensor([1 + (7 * (PAGES * b + i)) % (ROWS * PAGES) for i in range(PAGES)])
        inputs["state_slots_out"][b] = torch.tensor(slots)

    def _inputs(self, bucket: Bucket) -> Inputs:
        """Inputs of padding."""
        padding = StepInputs(bucket, limits(self.drafts)).padding()
        padding["uniform"].fill_(0.5)
        return padding


def valid_positions(bucket: Bucket, inputs: Inputs) -> torch.Tensor:
    """Which rows and positions [B, W] of a group count: no padding, and nothing after a draft that is not verified."""
    if bucket.kind == "prefill":
        return inputs["query_lens"][:, None] > 0
    return (inputs["request_slots"] > 0)[:, None] & (torch.arange(bucket.q_len) <= inputs["drafts"][:, None])


@functools.cache
def answers(model: step.Model, batch: int, live: tuple[int, ...], tokens: int) -> list[list[list[int]]]:
    """The outputs of each group's requests on devices without drafts, so many tokens each."""
    devices, serving = [OneDevice(model) for _ in live], Serving(batch, 0, live)
    for bucket, inputs in serving.steps(tokens - 1):
        serving.commit(bucket, inputs, [device.step(bucket, own) for device, own in zip(devices, inputs, strict=True)])
    return serving.output
