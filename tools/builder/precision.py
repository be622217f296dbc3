"""Decides in which numbers a build computes, stores and caches, and where its weights are."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch

from ...graphs import tree
from ...graphs.errors import PartitionError, SpecError
from ...lowering import isa
from ...models import registry, sharding_rules
from ...models.deployed import deployed, heads_for
from ...models.draft_model import PREFIX
from ...models.draft_source import open_both
from ...models.expert_placement import ExpertPlacement
from ...models.quant.description import formats_in
from ...models.quant.formats import FLOAT, INDEXERS, INT8, INT8_STATIC, UNROUNDED, Formats
from ...models.quant.recipes import formats_of_scheme
from ...models.safetensors_files import DTYPES as CODES
from ...models.safetensors_files import NAMES, has_weights
from . import deployments, expert_map
from .drafts import draft_vocab
from .planned import Plan
from .settings.model import KV_CACHE_DTYPES, MAX_LOGPROBS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STORED_BYTES = 8 * 2**30
"""Checkpoints up to this size are copied into an artifact by default."""

AUTO, BFLOAT16, INTEGERS, OF_INDEXERS = KV_CACHE_DTYPES
_LAYERS = "?*"
"""Every attention layer that has a name: those of a draft head of another family than DeepSeek's have none, and cache floats."""


def choose_dtype(plan: Plan) -> Plan:
    """The plan with the dtype to compute in; `auto` takes the only one of a target, or on x86 bfloat16."""
    requested, legal = plan.options.dtype, plan.target.dtypes
    if requested != "auto" and requested not in legal:
        names = " and ".join(("auto", *legal))
        raise SpecError(f"--dtype {requested} for {plan.target.name}: its fused operators take {', '.join(legal)}; legal are {names}")
    if requested != "auto" or len(legal) == 1:
        return replace(plan, dtype=DTYPES[legal[0] if requested == "auto" else requested])
    return replace(plan, dtype=torch.bfloat16 if isa.in_use() else torch.float32).noted(f"{_why()} (--dtype to change)")


def _why() -> str:
    """What is chosen where nothing is asked for, and why."""
    if not (level := isa.in_use()):
        return "dtype float32: how fast this CPU multiplies bfloat16 was never measured"
    if isa.has("avx512_bf16"):
        return f"dtype bfloat16: this CPU multiplies it in hardware ({level})"
    cpu = f"without what {isa.SWITCH}={isa.ISA} hides this CPU" if isa.ISA else "this CPU"
    return f"dtype bfloat16: it is half of float32's bytes to read, which {cpu} widens as it reads them ({level})"


def choose_formats(plan: Plan) -> Plan:
    """The plan with its model in the variant of the instance: with its formats, its cache, and heads that a tp group can share.

    Where a tp group has more ranks than key-value heads, the heads are replicated.

    Raises:
        SpecError: the formats are not legal for the model, or the ranks of a group cannot share its heads.
        CheckpointError: the checkpoint's description cannot be read.
    """
    config, mesh, target = plan.source.model.config, plan.mesh, plan.target
    formats = choose_kv_cache(_requested_cache(plan), _formats_of(plan), plan.dtype)
    if plan.options.expert_combine_dtype != "auto":
        formats = _sent_back_as_int8(formats, plan)
    group = mesh.axis("tp")
    sliced = sliced_over(plan) > 1
    try:
        heads_for(config, group, sliced=sliced)
    except PartitionError as error:
        raise SpecError(f"mesh {mesh}: {error}") from None
    placement = _expert_placement(plan)
    physical = len(placement.layers[0]) if placement else 0
    experts = physical or getattr(config, "num_experts", 0)
    variant = deployed(
        config,
        formats,
        mesh,
        sharding_rules.rules(mesh, experts=experts, expert_parallel=plan.expert_parallel, tokens=group, sliced=sliced),
        # vllm-ascend's recurrent operator takes the float32 states that checkpoints ask for; CANN's takes bfloat16 only.
        recurrent=torch.float32 if "vllm-ascend" in plan.platform.packages else getattr(torch, target.state_dtype),
        dispatches=target.dispatches,
        local=target.local,
        backend=plan.backend,
        platform=plan.platform,
        draft_vocab=draft_vocab(plan.options.draft_vocab_size, plan),
        physical_experts=physical,
        tells_experts=_tells_experts(plan),
    )
    model = replace(plan.source.model, config=replace(config, variant=variant), drafting=plan.limits.drafts > 0, placement=placement)
    return replace(plan, model=model)


def sliced_over(plan: Plan) -> int:
    """Ranks of a group that share the tokens of a prompt in attention: as asked for, or published.

    Raises:
        SpecError: they are neither one nor all ranks of a group.
    """
    group = plan.mesh.axis("tp")
    row = deployments.deployment(plan.deployment).phases[plan.phase] if plan.deployment else None
    asked = plan.options.prefill_cp or (group if row and row.context_parallel else 1)
    if asked not in (1, group):
        legal = f"are 1 and {group}, all ranks of a group" if group > 1 else "is 1: no ranks share a prompt"
        raise SpecError(f"--prefill-cp {asked} with mesh {plan.mesh}; legal {legal}")
    return asked


def _tells_experts(plan: Plan) -> bool:
    """Whether steps return the experts of their tokens."""
    experts = getattr(plan.source.model.config, "num_experts", 0)
    shared = plan.mesh.size > 1 and plan.expert_parallel and experts
    if plan.options.expert_counts and not shared:
        raise SpecError(f"--expert-counts for {plan.source.name}, mesh {plan.mesh}; legal is a model whose experts several ranks share")
    return bool(plan.options.expert_counts)


def _expert_placement(plan: Plan) -> ExpertPlacement | None:
    """Where a map puts the experts of the plan's model."""
    if plan.options.expert_map is None:
        return None
    model, ranks = replace(plan.source.model, drafting=plan.limits.drafts > 0), plan.mesh.size if plan.expert_parallel else 1
    return expert_map.fitted(expert_map.read(plan.options.expert_map), model, ranks, plan.target.nodes(plan.mesh))


def _formats_of(plan: Plan) -> Formats:
    """The formats of a checkpoint that is quantised, else those of the scheme; a draft model of its own stays float."""
    source, scheme = plan.source, plan.quantization
    formats = formats_in(source.checkpoint_dir, decodes_only=plan.phase == "decode") if source.checkpoint_dir else None
    if formats is None:
        formats = formats_of_scheme(scheme, registry.published_name(source))
    elif scheme != "none" and not plan.deployment:
        raise SpecError(f"--quantization {scheme}: {source.checkpoint_dir} is quantised already; legal is none")
    return formats.floats_first(f"{PREFIX}*") if source.draft and formats.quantises else formats


def _requested_cache(plan: Plan) -> str:
    """What the build asks for, or else its deployment."""
    requested, row = plan.options.kv_cache_dtype, deployments.deployment(plan.deployment) if plan.deployment else None
    return (row.kv_cache_dtype if row and requested == AUTO else None) or requested


def choose_kv_cache(requested: str, formats: Formats, dtype: torch.dtype) -> Formats:
    """The formats with that of the cache: "auto" is what the checkpoint has, else floats; "int8" takes its scales where it has them.

    Indexers that a checkpoint leaves float stay so.

    Args:
        formats: of the checkpoint, or of a scheme.
        dtype: that the model computes in.

    Raises:
        SpecError: floats of another dtype than the model's are asked for.
    """
    if requested == BFLOAT16:
        if dtype != torch.bfloat16:
            raise SpecError(f"--kv-cache-dtype {requested}: the model computes in {dtype} and caches no others; legal are auto and int8")
        return replace(formats, kv_cache=())
    named = tuple(rule for rule in formats.kv_cache if rule[0].endswith(INDEXERS[1:]))
    indexers = (*named, (INDEXERS, FLOAT)) if named else ()
    if requested == OF_INDEXERS:
        return replace(formats, kv_cache=named or ((INDEXERS, INT8),))
    if requested == INTEGERS:
        static = tuple(rule for rule in formats.kv_cache if rule[1] == INT8_STATIC)
        return replace(formats, kv_cache=(*static, *indexers, (_LAYERS, INT8)))
    return formats


def _sent_back_as_int8(formats: Formats, plan: Plan) -> Formats:
    """The formats with int8 for what experts send back."""
    rounded = [form for pattern, form in formats.rules if "experts" in pattern and form not in UNROUNDED]
    spread = plan.expert_parallel and plan.mesh.size > 1 and plan.target.dispatches
    if plan.target.chip != "ascend910_93" or not (spread and rounded):
        has = f"{plan.target.name}, mesh {plan.mesh}, experts in {rounded[0] if rounded else FLOAT}"
        raise SpecError(
            f"--expert-combine-dtype int8 for {has}; legal is that for an Atlas A3 whose ranks share experts that read int8 (W8A8, W4A8)"
        )
    return replace(formats, sent_back=INT8)


def check_kv_cache(plan: Plan) -> Plan:
    """The plan, which says what its cache is where that is not floats.

    Raises:
        SpecError: int8 for a model of which no layer caches what may be int8.
    """
    formats = plan.model.config.variant.formats
    if not any(form != FLOAT for _, form in formats.kv_cache):
        return plan
    pools = {path.rpartition(".")[2] for path, aval in tree.flatten(plan.model.state(plan.limits, plan.dtype)) if aval.dtype == torch.int8}
    if not pools and all(pattern.endswith(INDEXERS[1:]) for pattern, _ in formats.kv_cache):
        raise SpecError(
            f"--kv-cache-dtype {OF_INDEXERS}: {plan.model.name} has no indexer, which DeepSeek V3.2 and GLM-5 have; legal are "
            f"{', '.join(name for name in KV_CACHE_DTYPES if name != OF_INDEXERS)}"
        )
    if not pools:
        raise SpecError(
            f"--kv-cache-dtype {INTEGERS}: {plan.model.name} caches no keys and values of heads but latents, of which fused attention "
            "over all keys takes no int8 in row-major pages (Ascend/op-plugin@517f2e7, npu_fused_infer_attention_score: none beside "
            "query_rope), and that over keys that an indexer chooses does; legal are auto, bfloat16"
        )
    static = any(form == INT8_STATIC for _, form in formats.kv_cache)
    heads = "scales of the checkpoint, one a head's channel" if static else "one scale a token and head, beside the pages"
    said = {
        "k": f"keys and values are cached as int8, {heads}",
        "packed": "latents are cached as int8, one scale each 128 channels of a token, their rotary parts in the same rows as they are",
        "index": "keys of indexers are cached as int8, one scale a token, and queries are rounded to match",
    }
    return plan.noted("; ".join(text for pool, text in said.items() if pool in pools))


def choose_weights(plan: Plan) -> Plan:
    """The plan with where its weights are: "stored" in the artifact, "bound" to it by reference, or "none".

    Bound weights stay in the checkpoint, are quantised and laid out when they are loaded, and need the checkpoint when serving.

    Raises:
        SpecError: the target or the model leaves no such choice.
        CheckpointError: the checkpoint cannot be read.
    """
    weights, note = _weights(plan.options.weights or "auto", plan)
    return replace(plan, weights=weights).noted(note).noted(_rounding(plan) if weights != "none" else None)


def _rounding(plan: Plan) -> str | None:
    """Which of the checkpoint's floats the plan's dtype has no room for, if most of them are."""
    assert plan.source.checkpoint_dir
    sizes = Counter[str]()
    for entry in open_both(plan.source.checkpoint_dir, plan.source.draft).tensors.values():
        sizes[entry.dtype] += entry.nbytes if entry.dtype in CODES else 0
    stored = CODES.get(max(sizes, key=sizes.__getitem__, default=""))
    if stored is None or torch.finfo(stored).eps >= torch.finfo(plan.dtype).eps:
        return None
    kept = "; --dtype float32 keeps them" if "float32" in plan.target.dtypes else ""
    return f"the checkpoint's {str(stored)[6:]} weights are rounded to {str(plan.dtype)[6:]}{kept}"


def _weights(requested: str, plan: Plan) -> tuple[str, str | None]:
    source, target = plan.source, plan.target
    if target.local and requested == "bound":
        raise SpecError(f"--weights bound for {target.name}: what runs here is proved with the weights of its artifact; legal is stored")
    directory = source.checkpoint_dir
    if directory is None:
        if requested != "auto":
            raise SpecError(f"--weights {requested}: {source.name} has no weights; legal is a path to a checkpoint directory")
        return "none", None
    if not target.local and (requested, plan.backend) == ("auto", "null"):
        return "none", None
    if source.draft and source.draft.directory is None:
        raise SpecError(f"--draft-model {source.draft.name} has no weights, {source.name} has; legal is a path to a checkpoint directory")
    if target.local:
        return "stored", None
    if requested != "auto":
        return requested, None
    if not has_weights(directory):
        legal = ", ".join(name for names in NAMES for name in names)
        return "none", f"no weights: {directory} holds none of {legal}; serving needs --checkpoint DIR"
    size = open_both(directory, source.draft).nbytes
    if size <= STORED_BYTES:
        return "stored", f"weights: {size / 1e9:,.1f} GB are copied into the artifact (--weights bound to read {directory} when serving)"
    return "bound", f"weights: {size / 1e9:,.1f} GB stay in {directory}, which serving reads (--weights stored to copy them)"


def choose_logprobs(plan: Plan) -> Plan:
    """The plan with the number of most likely tokens whose log probabilities a step returns; steps that score prompts do so.

    Raises:
        SpecError: the vocabulary has fewer tokens.
    """
    most = min(MAX_LOGPROBS, plan.source.model.config.vocab_size)
    default = most if plan.options.score else min(plan.target.max_logprobs, most)
    count = default if plan.options.max_logprobs is None else plan.options.max_logprobs
    if count > most:
        raise SpecError(f"max_logprobs is {count}; legal for {plan.source.name} are 0 to {most}")
    return replace(plan, max_logprobs=int(count))
