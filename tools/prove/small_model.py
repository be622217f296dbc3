"""Small models for proofs: a few narrow layers, spread over the mesh and lowered in the same way as an artifact's own model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import gcd

import torch

from ...graphs import tree
from ...graphs.ops.fused_experts import FEWEST_TOKENS
from ...graphs.steps.decode import DECODE
from ...graphs.steps.table import STEP_KINDS, kind_of
from ...graphs.types import Bucket, Limits, Mesh, Rules
from ...lowering.artifact.manifest import GraphEntry, Manifest
from ...models import draft_vocabulary, expert_placement
from ...models.deployed import heads_for
from ...models.params import Param, Source
from ...models.quant.formats import UNROUNDED, W4A16, Formats
from ...models.sharding_rules import rules_of
from ...models.shrink import EXPERT_FFN
from ...models.step import Model
from ..artifact_model import full_model, spreads, with_variant
from ..builder.rank_memory import share

CHUNK_TOKENS = 192
"""Tokens of a small prefill: more than a page, and three chunks of the delta rule, so that a state passes through the middle one."""

PROMPT_EXCESS = 37
"""Most tokens by which the longest prompt exceeds a prefill chunk."""

MAX_REQUESTS = 3
"""Most requests of a dp group; buckets have more rows, so that some are padding."""

PICTURE_ROWS = 9
"""Rows of pictures that prompts read, where graphs take them."""

DELTA_CHUNK = 64
NARROW_GROUP = 8
"""Most int4 weights of a group in a small model."""
MOST_DRAFT_LAYERS = 4
_LAYERS = re.compile(r"(.*\blayers\.)([^.]*\d[^.]*)(\..*|)")
"""A pattern of names of some layers: what is before their numbers, these, and what is behind."""
DISPATCH, FUSED = "moe_dispatch", "fused_experts_w4a8"


@dataclass(frozen=True, order=True)
class Form:
    """The properties of a bucket that decide how it is laid out and lowered; buckets of one form have the same operators.

    Attributes:
        kind: the bucket's kind.
        width: of decode Q; of prefill the largest power of two up to 64 that divides Q, which is the chunk of the delta rule.
        shared: whether the devices of a group split the tokens of a step.
        evenly: whether they do so without padding.
        rows_shared: whether they split its requests without padding, as sampling and the draft head's later passes do.
        one_row: whether each of several devices samples after one token alone: then nothing is transposed between them.
        dispatched: which tokens are sent to the devices of their experts instead of being gathered on all: "none", "drafts" (those of
            the draft head's later passes, one a request), "all", or "parts" (all, those of a layer by several dispatches).
        fused: whether what is sent is one operation with the experts, there and back.
        parts: by how many dispatches all tokens of a layer are sent.
        together: whether a step has several requests; one alone needs no transposition.
        sliced: whether devices share its tokens in attention too.
    """

    kind: str
    width: int
    shared: bool
    evenly: bool
    rows_shared: bool
    one_row: bool
    dispatched: str
    fused: bool = False
    parts: int = 1
    together: bool = False
    sliced: bool = False

    @staticmethod
    def of(bucket: Bucket, tp: int, dispatched: str, fused: bool = False, parts: int = 1, sliced: bool = False) -> Form:
        """The form of a bucket in groups of `tp` devices; `sliced` is of the model's variant."""
        width = bucket.q_len if kind_of(bucket).decodes else gcd(bucket.q_len, DELTA_CHUNK)
        rows_shared, sampled = bucket.batch % tp == 0, bucket.tokens if kind_of(bucket).decodes else bucket.batch
        one_row, together = tp > 1 and rows_shared and sampled == tp, bucket.batch > 1
        shared, evenly = bucket.tokens >= tp, bucket.tokens % tp == 0
        sliced = sliced and kind_of(bucket).chunks and bucket.q_len % (2 * tp) == 0
        return Form(bucket.kind, width, shared, evenly, rows_shared, one_row, dispatched, fused, parts, together, sliced)


@dataclass(frozen=True)
class BucketCase:
    """A bucket of the small model, and the artifact's graphs it stands for: those of the same form."""

    bucket: Bucket
    form: Form
    stands_for: tuple[GraphEntry, ...] = field(compare=False)


@dataclass(frozen=True)
class SmallModel:
    """A small model with the structure of a large one.

    Attributes:
        shipped: in the artifact's variant.
        model: the same with float32 state.
        reference: the variant for one device: no repeated heads, and float experts in the layout of a checkpoint. Where activations are
            rounded it keeps padded heads, which decide what a rank rounds together.
        cases: prefill first; all use the same state pools.
        limits: of one dp group.
        requests: most requests of a dp group.
        decode_steps: steps of each decode case.
        max_logprobs: number of most likely tokens whose log probabilities the artifact's graphs return.
        expert_parallel: whether whole experts are spread over all devices.
    """

    shipped: Model
    model: Model
    reference: Model
    mesh: Mesh
    cases: tuple[BucketCase, ...]
    limits: Limits
    requests: int
    decode_steps: int
    max_logprobs: int
    expert_parallel: bool

    def model_for(self, case: BucketCase, dtype: torch.dtype) -> Model:
        """The model of a case's graph with that computing dtype; how tokens get to their experts depends on the case."""
        model, rows = self.model_in(dtype), share(case.bucket, case.bucket.batch, self.mesh.axis("tp"))
        part = -(-share(case.bucket, case.bucket.tokens, self.mesh.axis("tp")) // case.form.parts)
        most = {"none": 0, "drafts": rows, "all": model.config.variant.most_dispatched, "parts": part}[case.form.dispatched]
        parts, fused = case.form.dispatched == "parts", case.form.fused
        return with_variant(model, replace(model.config.variant, most_dispatched=most, dispatches_in_parts=parts, fused_experts=fused))

    def model_in(self, dtype: torch.dtype) -> Model:
        """The model with that computing dtype; parameters and state are the same for all cases."""
        return self.model if dtype == torch.float32 else self.shipped

    def rules(self, case: BucketCase | None = None) -> Rules:
        """Layout of a case's graph, or of parameters and state, which is the same for all cases."""
        return rules_of(self.model.config, self.mesh, case.bucket if case else None, expert_parallel=self.expert_parallel)


def shrink(manifest: Manifest, steps: int) -> SmallModel:
    """A small model with the structure of an artifact's.

    Args:
        steps: decode steps of each decode case; more are made if that many cannot accept every number of drafts.
    """
    mesh, large = Mesh.parse(manifest.mesh), full_model(manifest)
    small = replace(large, config=large.family.shrink(large.config, mesh.axis("tp"), mesh.size))
    # Random floats, which are quantised when they are loaded.
    formats = replace(small.config.variant.formats, stored=False)
    formats = _of_small_layers(_small_groups(formats), large.config.layer_kinds, small.config.layer_kinds)
    rows = draft_vocabulary.small(small.config, mesh.axis("tp"))
    heads = heads_for(small.config, mesh.axis("tp"), sliced=small.config.variant.sliced)
    shipped = replace(small.config.variant, formats=formats, draft_vocab=rows, **heads)
    physical, placement = expert_placement.small(small.config, large.config, small.config.num_moe_layers + 1)
    shipped = replace(shipped, physical_experts=physical)
    small, variant = with_variant(replace(small, placement=placement), shipped), replace(shipped, recurrent=torch.float32)
    plain = replace(variant, grouped=False, padded=(), physical_experts=0, expert_ranks=1)
    if not (variant.heads and any(form not in UNROUNDED for _, form in formats.rules)):
        # One device that stands for all rounds the parts of activations that ranks have, which are those of padded heads.
        plain = replace(plain, kv_repeat=1, heads=(), draft_heads=())
    # Graphs of a tower have a reference of their own, and no requests (tests/lowering/ascend/test_encode.py).
    entries = [entry for entry in manifest.graphs if not kind_of(entry.bucket).tower]
    cases = small_buckets(entries, mesh.axis("tp"), manifest.limits.drafts, large.config.num_moe_layers, sliced=variant.sliced)
    rows = max((case.bucket.batch for case in cases if kind_of(case.bucket).decodes), default=MAX_REQUESTS + 1)
    requests = max(1, min(MAX_REQUESTS, rows - 1))
    width, decode = manifest.limits.drafts + 1, [case.bucket for case in cases if kind_of(case.bucket).decodes]
    # Of three requests one has too little room left to accept all drafts; the others must show every count.
    fewest = min((max(1, min(requests, bucket.batch - 1, 2)) for bucket in decode), default=1)
    steps = max(steps, -(-(width + 1) // fewest))
    decoded = width * (1 + steps) * len(decode)
    longest = max(CHUNK_TOKENS, *(case.bucket.q_len for case in cases)) + PROMPT_EXCESS + decoded
    page, slots = manifest.limits.page_size, manifest.limits.slots_per_request
    pages = -(-longest // page)
    # Some pages, slots and a request slot stay without an owner: they hold NaN, which must never be read.
    limits = Limits(page, 2 + requests * pages, 1 + (requests + 1) * slots, pages * page, slots, manifest.limits.drafts)
    limits = limits.with_bitmasks(manifest.limits.bitmasks, small.config.vocab_size)
    limits = limits.with_adjustments(manifest.limits.logit_adjustments, small.config.vocab_size)
    limits = replace(limits, picture_rows=min(manifest.limits.picture_rows, PICTURE_ROWS))
    models = small, with_variant(small, variant), with_variant(small, plain)
    max_logprobs = max((entry.max_logprobs for entry in manifest.graphs), default=0)
    return SmallModel(*models, mesh, cases, limits, requests, steps, max_logprobs, spreads(manifest))


def _small_groups(formats: Formats) -> Formats:
    """The formats with groups of int4 weights that fill a small expert's contraction, or a rank's part of one outside experts."""
    narrowest = NARROW_GROUP if any(form == W4A16 for _, form in formats.rules) else EXPERT_FFN
    return replace(formats, group=gcd(formats.group, narrowest)) if formats.group else formats


def _of_small_layers(formats: Formats, large: Sequence[str], small: Sequence[str]) -> Formats:
    """The formats of the layers that small ones stand for, so that each kind of layer is there in all its formats, if it has room for them.

    Args:
        large, small: kinds of the layers.
    """
    named = [*formats.biased, *(pattern for pattern, _ in (*formats.rules, *formats.kv_cache))]
    numbers = sorted({found[2] for pattern in named if (found := _LAYERS.fullmatch(pattern))})
    kinds = [(kind, *(fnmatchcase(str(i), number) for number in numbers)) for i, kind in enumerate(large)]
    stands_for = [i if large[i] == kind else large.index(kind) for i, kind in enumerate(small)]
    for layer, kind in enumerate(kinds):
        shown = [kinds[each] for each in stands_for]
        twice = [i for i, each in enumerate(shown) if each[0] == kind[0] and shown.count(each) > 1]
        if kind not in shown and twice:
            stands_for[twice[-1]] = layer
    # Draft layers come behind the others.
    stands_for += range(len(large), len(large) + MOST_DRAFT_LAYERS)

    def renamed(pattern: str) -> list[str]:
        if (found := _LAYERS.fullmatch(pattern)) is None:
            return [pattern]
        return [f"{found[1]}{i}{found[3]}" for i, layer in enumerate(stands_for) if fnmatchcase(str(layer), found[2])]

    both = (formats.rules, formats.kv_cache)
    rules, caches = (tuple((name, form) for pattern, form in each for name in renamed(pattern)) for each in both)
    return replace(formats, rules=rules, kv_cache=caches, biased=tuple(name for pattern in formats.biased for name in renamed(pattern)))


def small_buckets(entries: Iterable[GraphEntry], tp: int, drafts: int, layers: int, *, sliced: bool = False) -> tuple[BucketCase, ...]:
    """One small bucket for every form among graphs that make up to `drafts` drafts after so many layers with experts; none that encodes."""
    forms: dict[Form, list[GraphEntry]] = {}
    for entry in (entry for entry in entries if not kind_of(entry.bucket).tower):
        fused = any(name == FUSED for name, *_ in entry.collectives)
        made = entry.bucket.q_len - 1 if kind_of(entry.bucket).decodes else drafts
        form = Form.of(entry.bucket, tp, dispatched(entry, made, layers), fused, parts_of(entry, made, layers), sliced)
        forms.setdefault(form, []).append(entry)
    cases = [BucketCase(_bucket(form, tuple(entries), tp), form, tuple(entries)) for form, entries in forms.items()]
    return tuple(sorted(cases, key=lambda case: (not kind_of(case.bucket).chunks, case.form)))


def dispatched(entry: GraphEntry, drafts: int, layers: int) -> str:
    """`Form.dispatched` of a graph, from the number of its dispatches: each pass over a layer with experts has one, or several."""
    sent = sum(name in (DISPATCH, FUSED) for name, *_ in entry.collectives)
    if sent > layers + drafts:
        return "parts"
    return "none" if not sent else "drafts" if sent <= drafts else "all"


def parts_of(entry: GraphEntry, drafts: int, layers: int) -> int:
    """By how many dispatches a graph sends all tokens of a layer; the draft head's passes have one each."""
    sent = sum(name in (DISPATCH, FUSED) for name, *_ in entry.collectives)
    return max(1, (sent - drafts) // layers) if layers else 1


def _bucket(form: Form, entries: tuple[GraphEntry, ...], tp: int) -> Bucket:
    """The smallest bucket of a form with room for three rows and one of padding; the smallest of `entries` if there is none."""
    smallest, longest = min(entry.bucket for entry in entries), max(entry.bucket.q_len for entry in entries)
    fewest = FEWEST_TOKENS * form.parts if form.fused else 0
    if STEP_KINDS[form.kind].decodes:
        most = MAX_REQUESTS + 2 + 2 * tp + tp * fewest // form.width
        candidates = [DECODE.bucket(batch, form.width) for batch in range(MAX_REQUESTS + 1, most)]
    else:
        sizes = sorted(range(1, longest + 1), key=lambda q_len: abs(q_len - min(longest, CHUNK_TOKENS)))
        # With several prompts one row is padding, where the bucket has as many.
        batches = range(min(smallest.batch, MAX_REQUESTS + 1), smallest.batch + 1)
        candidates = [STEP_KINDS[form.kind].bucket(batch, q_len) for q_len in sizes for batch in batches]
    # Each device has the tokens that fused experts want, in each part.
    candidates = [bucket for bucket in candidates if share(bucket, bucket.tokens, tp) >= fewest]
    candidates = [bucket for bucket in candidates if _parts(share(bucket, bucket.tokens, tp), form.parts) == form.parts]
    # Only the draft head's passes are dispatched, so the main pass must have more tokens a device than they have.
    if form.dispatched == "drafts":
        candidates = [bucket for bucket in candidates if share(bucket, bucket.tokens, tp) > share(bucket, bucket.batch, tp)]
    alike = (form.dispatched, form.fused, form.parts, form.sliced)
    return next((bucket for bucket in candidates if Form.of(bucket, tp, *alike) == form), smallest)


def _parts(tokens: int, parts: int) -> int:
    """How many parts of a size there are, if the size is that of one of so many."""
    return -(-tokens // -(-tokens // parts))


def random_checkpoint(model: Model, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random float32 tensors of a checkpoint of the model, by name on disk; none is close to all zeros or all ones."""
    tensors: dict[str, torch.Tensor] = {}
    params = [param for _, param in tree.flatten(model.params(torch.float32))]
    # First rows are of tensors that others have whole.
    for param in sorted(params, key=lambda param: param.source.first_rows):
        for name, shape in zip(param.source.names, param.source.shapes, strict=True):
            if name not in tensors and not (param.source.first_rows and tensors.keys() & {*param.source.instead}):
                noise = torch.randn(shape, generator=generator)
                near = param.init in ("zeros", "ones")
                tensors[name] = float(param.init == "ones") + 0.2 * noise if near else noise * shape[-1] ** -0.5
    return tensors


def model_params(model: Model, checkpoint: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """A model's parameters from the tensors of a checkpoint: global, flat, and quantised from the same floats for every dtype."""
    leaves: list[tuple[str, Param]] = tree.flatten(model.params(dtype))
    joined = [(param.whole(*_tensors(param.source, checkpoint)), param.aval) for _, param in leaves]
    return [tensor.to(aval.dtype).reshape(aval.shape).contiguous() for tensor, aval in joined]


def _tensors(source: Source, checkpoint: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors of a checkpoint that a parameter is made from."""
    names = source.names if checkpoint.keys() >= {*source.names} else source.instead
    for name, shape in zip(names, source.shapes, strict=True):
        yield checkpoint[name][: shape[0]] if source.first_rows else checkpoint[name]
