"""Turns the description of an artifact for NPUs into a model of a few small layers that is spread over the same mesh in the same way."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any

import torch

from ...graphs import tree
from ...graphs.types import Bucket, Limits, Mesh, Rules
from ...lowering.artifact.manifest import GraphEntry, Manifest
from ...models import registry, sharding_rules
from ...models.params import Param
from ...models.step import Model
from ...models.variant import Variant
from ..build.targets import target

CHUNK_TOKENS = 192
"""A small prefill chunk: more than a page, and three chunks of the delta rule, so that a state passes through one of them."""

PROMPT_MORE = 37
"""Most tokens by which the longest prompt exceeds a chunk."""

MOST_REQUESTS = 3
"""Requests of a dp group, in buckets of more rows."""

LEAST_LAYERS, MOST_LAYERS = 4, 8
MOST_CHOICES = 4
DELTA_CHUNK = 64
DISPATCH = "moe_dispatch"


@dataclass(frozen=True, order=True)
class Form:
    """All of a bucket's sizes that decide how it is laid out and lowered; buckets of one form have the same operators.

    Attributes:
        kind: of the bucket.
        width: Q of decode; for prefill the largest power of two up to 64 that divides it, which is the delta rule's chunk.
        shared: devices of a group share the tokens of a step.
        evenly: without padding them.
        rows_shared: they share its requests evenly, when sampling and where the draft head drafts from one token of each.
        dispatched: which tokens are sent to the experts' devices instead of being gathered on all: "none", "drafts" (where the draft head
            drafts from one token a row) or "all".
    """

    kind: str
    width: int
    shared: bool
    evenly: bool
    rows_shared: bool
    dispatched: str

    @staticmethod
    def of(bucket: Bucket, tp: int, dispatched: str) -> Form:
        """The form of a bucket whose groups have `tp` devices."""
        width = bucket.q_len if bucket.kind == "decode" else gcd(bucket.q_len, DELTA_CHUNK)
        return Form(bucket.kind, width, bucket.tokens >= tp, bucket.tokens % tp == 0, bucket.batch % tp == 0, dispatched)


@dataclass(frozen=True)
class Case:
    """A small bucket, and the artifact's graphs it stands for: those of its form."""

    bucket: Bucket
    form: Form
    stands_for: tuple[GraphEntry, ...] = field(compare=False)


@dataclass(frozen=True)
class Scaled:
    """A small model in the image of a large one.

    Attributes:
        shipped: held as the artifact holds it.
        model: the same with float32 states.
        reference: the same as one device holds it: no copies of heads, float experts as a checkpoint has them.
        cases: prefill first; all run over the same pools.
        limits: of one dp group.
        requests: that every dp group has room for.
        steps: decode steps of each decode case.
        max_logprobs: of how many tokens the artifact's graphs tell log probabilities.
    """

    shipped: Model
    model: Model
    reference: Model
    mesh: Mesh
    cases: tuple[Case, ...]
    limits: Limits
    requests: int
    steps: int
    max_logprobs: int

    def held(self, case: Case, dtype: torch.dtype) -> Model:
        """The model of a case's graph that computes in a type: how experts get their tokens is the case's own."""
        model, rows = self.of(dtype), share(case.bucket, case.bucket.batch, self.mesh.axis("tp"))
        most = {"none": 0, "drafts": rows, "all": model.config.variant.most_dispatched}[case.form.dispatched]
        return with_variant(model, replace(model.config.variant, most_dispatched=most))

    def of(self, dtype: torch.dtype) -> Model:
        """The model whose graphs compute in a type; its parameters and state are those of all its cases."""
        return self.model if dtype == torch.float32 else self.shipped

    def rules(self, case: Case | None = None) -> Rules:
        """Layout of a case's graph; that of parameters and state is the same for all."""
        return rules_of(self.model, self.mesh, case.bucket if case else None)


def scaled(manifest: Manifest, steps: int) -> Scaled:
    """The small image of an artifact.

    Args:
        steps: decode steps of each decode case; there are more where so few do not accept every number of drafts.
    """
    mesh, large = Mesh.parse(manifest.mesh), full(manifest)
    small = replace(large, config=scaled_config(large.config, mesh))
    variant = replace(small.config.variant, recurrent=torch.float32)
    plain = replace(variant, kv_repeat=1, experts="plain" if variant.experts == "grouped" else variant.experts)
    cases = scaled_cases(manifest.graphs, mesh.axis("tp"), manifest.limits.drafts)
    rows = max((case.bucket.batch for case in cases if case.bucket.kind == "decode"), default=MOST_REQUESTS + 1)
    requests = max(1, min(MOST_REQUESTS, rows - 1))
    width, decode = manifest.limits.drafts + 1, [case.bucket for case in cases if case.bucket.kind == "decode"]
    # Of three requests one is busy with its end.
    fewest = min((max(1, min(requests, bucket.batch - 1, 2)) for bucket in decode), default=1)
    steps = max(steps, -(-(width + 1) // fewest))
    decoded = width * (1 + steps) * len(decode)
    longest = max(CHUNK_TOKENS, *(case.bucket.q_len for case in cases)) + PROMPT_MORE + decoded
    page, slots = manifest.limits.page_size, manifest.limits.slots_per_request
    pages = -(-longest // page)
    # Pages, slots and a seat that belong to nobody are left, to hold what must never be read.
    limits = Limits(page, 2 + requests * pages, 1 + (requests + 1) * slots, pages * page, slots, manifest.limits.drafts)
    held = small, with_variant(small, variant), with_variant(small, plain)
    return Scaled(*held, mesh, cases, limits, requests, steps, max((entry.max_logprobs for entry in manifest.graphs), default=0))


def with_variant(model: Model, variant: Variant) -> Model:
    """The same model, held otherwise."""
    return replace(model, config=replace(model.config, variant=variant))


def full(manifest: Manifest) -> Model:
    """The artifact's own model, held as the artifact holds it."""
    model = registry.from_config(str(manifest.model["name"]), json.loads(manifest.model["config"]))
    return replace(with_variant(model, variant_of(manifest, model.config)), drafting=manifest.limits.drafts > 0)


def variant_of(manifest: Manifest, config: Any) -> Variant:
    """How an artifact holds a model of that configuration."""
    mesh, pools = Mesh.parse(manifest.mesh), [leaf for leaf in manifest.state if leaf.name.endswith(".delta")]
    found = Variant.of(
        manifest.quantization,
        grouped=mesh.size > 1 and config.num_experts > 0,
        kv_repeat=max(1, mesh.axis("tp") // config.num_key_value_heads),
        recurrent=pools[0].aval.dtype if pools else torch.float32,
    )
    gathers = not target(manifest.target).dispatches
    return replace(found, most_dispatched=0) if gathers else found


def rules_of(model: Model, mesh: Mesh, bucket: Bucket | None = None) -> Rules:
    """Layout of a bucket's graph, or of parameters and state."""
    return sharding_rules.rules(mesh, experts=model.config.num_experts, tokens=bucket.tokens if bucket else mesh.axis("tp"))


def scaled_config(config: Any, mesh: Mesh) -> Any:
    """A configuration with the same kinds of layers in the same order and heads, channels and experts on every device.

    A device keeps one or two of each kind of head and of expert, more only where the large one has more, so that heads and experts of
    a device can be mistaken for each other. Widths are multiples of 8, as packed int4 matrices need.
    """
    tp, copies = mesh.axis("tp"), config.variant.kv_repeat
    keys = tp // copies * min(2, max(1, config.num_key_value_heads // tp))
    groups = min(2, config.num_attention_heads // (config.num_key_value_heads * copies))
    delta = tp * min(2, config.linear_num_key_heads // tp)
    values = min(2, config.linear_num_value_heads // config.linear_num_key_heads)
    experts = mesh.size * min(2, config.num_experts // mesh.size) if mesh.size > 1 else min(8, config.num_experts)
    width, rotary = 16, config.rotary_dim / config.head_dim
    return replace(
        config,
        vocab_size=tp * max(8, 256 // tp),
        hidden_size=64,
        num_attention_heads=keys * copies * groups,
        num_key_value_heads=keys,
        head_dim=width,
        rotary_dim=max(2, round(width * rotary) // 2 * 2),
        layer_types=scaled_layers(config.layer_types),
        linear_num_key_heads=delta,
        linear_num_value_heads=delta * values,
        linear_key_head_dim=width,
        linear_value_head_dim=width,
        intermediate_size=8 * max(4, tp) if config.intermediate_size else 0,
        num_experts=experts,
        num_experts_per_tok=min(config.num_experts_per_tok, MOST_CHOICES, max(1, experts // 2)) if experts else 0,
        moe_intermediate_size=32 if config.moe_intermediate_size else 0,
        shared_expert_intermediate_size=8 * max(4, tp) if config.shared_expert_intermediate_size else 0,
    )


def scaled_layers(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """The first whole periods of a pattern of layers that are four layers or more; of a long period the layers from its start."""
    each = period(kinds)
    return kinds[: min(each * -(-LEAST_LAYERS // each), len(kinds), MOST_LAYERS)]


def period(kinds: tuple[str, ...]) -> int:
    """After how many layers their kinds come again."""
    return next(n for n in range(1, len(kinds) + 1) if all(kind == kinds[i % n] for i, kind in enumerate(kinds)))


def scaled_cases(entries: Iterable[GraphEntry], tp: int, drafts: int) -> tuple[Case, ...]:
    """One small bucket for every form among the graphs, which draft so many tokens."""
    forms: dict[Form, list[GraphEntry]] = {}
    for entry in entries:
        forms.setdefault(Form.of(entry.bucket, tp, dispatched(entry, drafts)), []).append(entry)
    made = [Case(_bucket(form, tuple(held), tp), form, tuple(held)) for form, held in forms.items()]
    return tuple(sorted(made, key=lambda case: (case.form.kind != "prefill", case.form)))


def dispatched(entry: GraphEntry, drafts: int) -> str:
    """Which tokens a graph sends to experts' devices, as in `Form`; every pass over a layer has an exchange of its own."""
    sent = sum(name == DISPATCH for name, *_ in entry.collectives)
    return "none" if not sent else "drafts" if sent <= drafts else "all"


def share(bucket: Bucket, tokens: int, tp: int) -> int:
    """Tokens of one device in a pass over so many, of a bucket's step: groups share those of a step that has a token a device."""
    return -(-tokens // tp) if bucket.tokens >= tp else tokens


def _bucket(form: Form, entries: tuple[GraphEntry, ...], tp: int) -> Bucket:
    """The smallest bucket of a form with room for an odd number of rows and a row of padding; or the artifact's own."""
    smallest, longest = min(entry.bucket for entry in entries), max(entry.bucket.q_len for entry in entries)
    if form.kind == "decode":
        tried = [Bucket("decode", batch, form.width) for batch in range(MOST_REQUESTS + 1, MOST_REQUESTS + 2 + 2 * tp)]
    else:
        sizes = sorted(range(1, longest + 1), key=lambda q_len: abs(q_len - min(longest, CHUNK_TOKENS)))
        tried = [Bucket("prefill", smallest.batch, q_len) for q_len in sizes]
    # A device that sends the fewer tokens alone must have more in the step.
    if form.dispatched == "drafts":
        tried = [bucket for bucket in tried if share(bucket, bucket.tokens, tp) > share(bucket, bucket.batch, tp)]
    return next((bucket for bucket in tried if Form.of(bucket, tp, form.dispatched) == form), smallest)


def draw(model: Model, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint of the model, by name, each away from zeros and ones; [shapes as on disk] float32."""
    found: dict[str, torch.Tensor] = {}
    for _, param in tree.flatten(model.params(torch.float32)):
        for name, shape in zip(param.source.names, param.source.shapes, strict=True):
            if name not in found:
                noise = torch.randn(shape, generator=generator)
                found[name] = float(param.init == "ones") + 0.2 * noise if param.init in ("zeros", "ones") else noise * shape[-1] ** -0.5
    return found


def held_params(model: Model, checkpoint: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """A checkpoint as a model holds it: global tensors in the order of its flat parameters; quantised from the same floats in any type."""
    leaves: list[tuple[str, Param]] = tree.flatten(model.params(dtype))
    made = [(param.source.join(*(checkpoint[name] for name in param.source.names)), param.aval) for _, param in leaves]
    return [tensor.to(aval.dtype).reshape(aval.shape).contiguous() for tensor, aval in made]
