"""A small Qwen3.5 with drawn weights, run whole and on all ranks of a mesh in this process.

Test files reach it through the fixture `fleets`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.fx import GraphModule

from npucompile.graphs import tree
from npucompile.graphs.optimise import optimise
from npucompile.graphs.partition import Partitioned, partition
from npucompile.graphs.types import Aval, Bucket, Limits, Mesh, Rules, Tree
from npucompile.lowering.lockstep import Lockstep
from npucompile.lowering.shards import coordinates, local_slice
from npucompile.models import layout, qwen3_5, step
from npucompile.models.batch import abstract_inputs
from npucompile.models.params import initialise
from npucompile.models.variant import PLAIN, Variant

F32 = torch.float32
LIMITS = Limits(page_size=4, num_pages=23, num_slots=9, max_model_len=20, slots_per_request=2)
MOE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 12}
DENSE = {"intermediate_size": 28}


@functools.cache
def config(experts: bool = True) -> qwen3_5.Config:
    """Four layers, one of them full attention; sizes that four devices split, two key-value heads."""
    sizes: dict[str, Any] = MOE if experts else DENSE
    return qwen3_5.Config(
        vocab_size=40,
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
        rotary_dim=4,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        **sizes,
    )


@functools.cache
def tensors(experts: bool = True) -> Mapping[str, torch.Tensor]:
    """A checkpoint in memory: tensors by the names of their sources."""
    generator = torch.Generator().manual_seed(5)
    params = step.Model("small", qwen3_5, config(experts)).params(F32)
    found: dict[str, torch.Tensor] = {}
    for (_, param), (_, drawn) in zip(tree.flatten(params), tree.flatten(initialise(params, generator)), strict=True):
        # Away from zeros and ones, so that no parameter can be dropped without a change of logits.
        noisy = drawn + 0.2 * torch.randn(drawn.shape, generator=generator)
        found.update(zip(param.source.names, param.source.split(noisy), strict=True))
    return found


def model(variant: Variant = PLAIN, *, experts: bool = True) -> step.Model:
    return step.Model("small", qwen3_5, replace(config(experts), variant=variant))


def weights(found: step.Model) -> Tree:
    """The model's parameters, in the form that its variant holds them in."""
    held = tensors(found.config.num_experts > 0)
    return tree.map_leaves(lambda p: p.source.join(*(held[n] for n in p.source.names)).contiguous(), found.params(F32))


@dataclass
class Row:
    """One request of a group: what is in the cache, and where its state lies."""

    tokens: list[int]
    start: int
    pages: list[int]
    read: int
    write: list[int]


def inputs(bucket: Bucket, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """One group's inputs; what lies beyond its rows is padding."""
    avals: dict[str, Aval] = abstract_inputs(bucket, LIMITS)
    out = {name: torch.zeros(aval.shape, dtype=aval.dtype) for name, aval in avals.items()}
    out["top_p"].fill_(1.0)
    out["uniform"].fill_(0.5)
    for b, row in enumerate(rows):
        out["tokens"][b, : len(row.tokens)] = torch.tensor(row.tokens, dtype=torch.int32)
        out["starts"][b], out["lengths"][b], out["read_slots"][b] = row.start, len(row.tokens), row.read
        out["page_table"][b, : len(row.pages)] = torch.tensor(row.pages, dtype=torch.int32)
        out["write_slots"][b, : len(row.write)] = torch.tensor(row.write, dtype=torch.int32)
    return out


class Alone:
    """One group served by one device: the program, called as it is written."""

    def __init__(self, found: step.Model) -> None:
        self.model, self.weights = found, weights(found)
        self.state = tree.map_leaves(lambda aval: torch.zeros(aval.shape, dtype=aval.dtype), found.state(LIMITS, F32))

    @torch.no_grad()
    def step(self, bucket: Bucket, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        program = step.program(self.model, bucket, LIMITS, F32)
        outputs, self.state = program.forward(self.weights, self.state, given)
        return outputs


Form = Callable[[Partitioned], GraphModule]


@functools.cache
def partitioned(found: step.Model, mesh: Mesh, rules: Rules, bucket: Bucket, emit_logits: bool = True) -> Partitioned:
    return optimise(partition(step.program(found, bucket, LIMITS, F32, emit_logits=emit_logits), mesh, rules))


def functional(found: Partitioned) -> GraphModule:
    return found.graph


@dataclass
class Fleet:
    """All ranks of a mesh, each with its shard of everything, in lockstep.

    Attributes:
        form: what is run of a partitioned graph; one that returns no new state has written it in place.
        state: by rank, pools in the order of the signature.
    """

    model: step.Model
    mesh: Mesh
    expert_parallel: bool = True
    form: Form = functional
    emit_logits: bool = True
    state: list[list[torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rules, ranks = self.rules(1), range(self.mesh.size)
        flat = [tensor for _, tensor in tree.flatten(weights(self.model))]
        avals = [param.aval for _, param in tree.flatten(self.model.params(F32))]
        self.params = [[t[local_slice(a, self.mesh, rules, rank)].clone() for t, a in zip(flat, avals, strict=True)] for rank in ranks]
        self.pools = [aval for _, aval in tree.flatten(self.model.state(LIMITS, F32))]
        empty = [torch.zeros(aval.shape, dtype=aval.dtype) for aval in self.pools]
        cut = [[t[local_slice(a, self.mesh, rules, rank)].clone() for t, a in zip(empty, self.pools, strict=True)] for rank in ranks]
        self.state = cut
        self.graphs: dict[Bucket, Lockstep] = {}

    def rules(self, tokens: int) -> Rules:
        return layout.rules(self.mesh, experts=self.model.config.num_experts, expert_parallel=self.expert_parallel, tokens=tokens)

    def partitioned(self, bucket: Bucket) -> Partitioned:
        return partitioned(self.model, self.mesh, self.rules(bucket.tokens), bucket, self.emit_logits)

    def step(self, bucket: Bucket, given: Sequence[Mapping[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
        """Outputs of every group, given the inputs of every group; all ranks of a group say the same."""
        found = self.partitioned(bucket)
        if bucket not in self.graphs:
            self.graphs[bucket] = Lockstep(self.form(found), self.mesh)
        names = [leaf.name.removeprefix("outputs.") for leaf in found.signature.outputs]
        operands = []
        for rank in range(self.mesh.size):
            at = coordinates(Mesh((("dp", self.mesh.axis("dp")), ("tp", self.mesh.axis("tp")))), rank)
            own = [t.clone() for _, t in tree.flatten(given[at["dp"]])]
            operands.append([*self.params[rank], *self.state[rank], *own, torch.tensor([at["dp"], at["tp"]], dtype=torch.int32)])
        results = self.graphs[bucket](operands)
        outputs = []
        for rank, values in enumerate(results):
            if len(values) > len(names):
                self.state[rank] = values[len(names) :]
            outputs.append(dict(zip(names, values[: len(names)], strict=True)))
        share = self.mesh.axis("tp")
        for rank, said in enumerate(outputs):
            for name, value in said.items():
                first = outputs[rank - rank % share][name]
                # What a device says of padding may be NaN.
                assert torch.equal(value.nan_to_num(0.25), first.nan_to_num(0.25)), f"rank {rank} says other {name} than its group"
        return outputs[::share]

    def pool(self, group: int) -> list[torch.Tensor]:
        """The pools of one group, put together from its ranks."""
        share, rules = self.mesh.axis("tp"), self.rules(1)
        whole = [torch.empty(aval.shape, dtype=aval.dtype) for aval in self.pools]
        for rank in range(group * share, (group + 1) * share):
            for tensor, aval, part in zip(whole, self.pools, self.state[rank], strict=True):
                tensor[local_slice(aval, self.mesh, rules, rank)] = part
        return whole


def prompts(group: int, batch: int) -> list[list[int]]:
    """Requests of one group; lengths and ids differ between rows and groups. Longer than a page, at most 7."""
    generator = torch.Generator().manual_seed(100 + group)
    return [torch.randint(1, 40, (7 - (group + b) % 4,), generator=generator).tolist() for b in range(batch)]


class Serving:
    """Requests of some groups: prefill, then decode steps of Q candidates, of which the last steps' are accepted or not."""

    def __init__(self, batch: int, q_len: int, live: Sequence[int]) -> None:
        """`live`: how many rows of each group hold a request."""
        self.prefill, self.decode = Bucket("prefill", batch, 7), Bucket("decode", batch, q_len)
        self.live, self.q_len, self.turn = list(live), q_len, 0
        self.requests = [prompts(group, rows) for group, rows in enumerate(live)]
        self.done = [[0] * rows for rows in live]
        self.slot = [[self._slots(b)[0] for b in range(rows)] for rows in live]

    def _slots(self, b: int) -> list[int]:
        return [1 + self.q_len * b + i for i in range(self.q_len)]

    def _pages(self, b: int) -> list[int]:
        return [1 + (7 * (5 * b + i)) % 22 for i in range(5)]

    def first(self) -> list[dict[str, torch.Tensor]]:
        return [
            inputs(self.prefill, [Row(ids, 0, self._pages(b), 0, self._slots(b)[:1]) for b, ids in enumerate(group)])
            for group in self.requests
        ]

    def next(self) -> list[dict[str, torch.Tensor]]:
        """Each row's last token and, for more candidates, ones that nobody predicted."""
        return [
            inputs(
                self.decode,
                [
                    Row(
                        [ids[-1], *((ids[-1] + 7 * i) % 39 + 1 for i in range(1, self.q_len))],
                        self.done[g][b],
                        self._pages(b),
                        self.slot[g][b],
                        self._slots(b),
                    )
                    for b, ids in enumerate(group)
                ],
            )
            for g, group in enumerate(self.requests)
        ]

    def start(self) -> list[dict[str, torch.Tensor]]:
        """Decode steps that are the first of their requests."""
        return [
            inputs(self.decode, [Row(ids[: self.q_len], 0, self._pages(b), 0, self._slots(b)) for b, ids in enumerate(group)])
            for group in self.requests
        ]

    def take(self, said: Sequence[torch.Tensor], given: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Goes on from tokens [B, W] of each group: after a prompt its first, after candidates one or all of them."""
        for g, group in enumerate(self.requests):
            for b, ids in enumerate(group):
                if not self.done[g][b]:
                    self.done[g][b] = len(ids)
                    ids.append(int(said[g][b, 0]))
                    continue
                accepted = self.q_len if (self.turn + b) % 2 else 1
                ids += given[g]["tokens"][b, 1:accepted].tolist()
                ids.append(int(said[g][b, accepted - 1]))
                self.done[g][b] += accepted
                self.slot[g][b] = self._slots(b)[accepted - 1]
        self.turn += 1
