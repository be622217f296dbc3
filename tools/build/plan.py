"""Plans a build: decides and checks model, buckets, sizes and memory before anything is traced."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch

from ...graphs import tree
from ...graphs.errors import PartitionError, SpecError
from ...graphs.types import Aval, Bucket, Limits, Mesh, Rules
from ...lowering.platform import CPU, Platform
from ...models import registry, sharding_rules, step
from ...models.deployed import deployed, heads_for
from ...models.draft_model import PREFIX
from ...models.family_file import FamilyFile
from ...models.quant.description import formats_in
from ...models.quant.formats import Formats
from ...models.quant.recipes import formats_of_scheme
from ..notation import PrefillSize
from .backend_choice import choose_backend
from .checkpoint_slots import with_checkpoint_slots
from .choices import MAX_LOGPROBS
from .decisions import Decided, decided, format_decided
from .dispatch_size import fit_dispatch
from .draft_choice import check_drafts, choose_draft_model, draft_name, draft_vocab
from .dtype_choice import choose_dtype
from .instance import Instance, resolve, row_of
from .kv_cache_choice import check_kv_cache, choose_kv_cache
from .kv_cache_choice import note as kv_cache_note
from .memory import local_bytes
from .notes import deviation_notes, drafts_note, eos_notes, length_note, padding_notes
from .pool_size import fit_pool, within_memory
from .settings.table import SETTINGS
from .sizes import decode_sizes, prefill_buckets
from .targets import MACHINE_BYTES, Target
from .weights_choice import choose_weights


@dataclass(frozen=True)
class Options:
    """The options of `npucompile build` (settings/table.py); None leaves the choice to the plan.

    Attributes:
        model: preset name or checkpoint directory.
        decided_by: who decided the settings where a build is repeated by its arguments (tools/build/decisions.py).
    """

    model: str
    buckets: tuple[int, ...] | None = None
    prefill: tuple[PrefillSize, ...] | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    dtype: str = "auto"
    backend: str | None = None
    target: str | None = None
    mesh: str | None = None
    deployment: str | None = None
    phase: str | None = None
    quantization: str | None = None
    num_speculative_tokens: int | None = None
    max_logprobs: int | None = None
    structured_outputs: int | None = None
    logit_adjustments: int | None = None
    weights: str | None = None
    draft_model: str | None = None
    family: str | None = None
    cann: str | None = None
    operator_packages: tuple[str, ...] = ()
    kv_cache_dtype: str = "auto"
    max_total_tokens: int | None = None
    decided_by: str | None = None
    checkpoint_slots: int | None = None
    kv_cache_memory: int | None = None
    draft_vocab_size: int | None = None


@dataclass(frozen=True)
class Plan:
    """A build whose every choice is made and checked.

    Attributes:
        source: the model as it was found, and its checkpoint if it has one.
        model: the same in the variant of this build.
        limits: of one dp group.
        notes: choices made for the user, each with its reason.
        published: whether the limits are the deployment's, not derived from a context and a number of requests.
        max_logprobs: number of most likely tokens whose log probabilities a step returns; 0 for none.
        weights: "stored" in the artifact, "bound" to it by reference, or "none".
        platform: what the graphs are lowered for.
        expert_parallel: whether whole experts are spread over all ranks; else each is split over a group.
        kv_cache_dtype, max_total_tokens, kv_cache_memory: as they were asked for.
        decided_by: who decided each setting; plans that differ in nothing else are equal.
    """

    source: registry.ModelSource
    model: step.Model
    buckets: tuple[Bucket, ...]
    limits: Limits
    dtype: torch.dtype
    backend: str
    notes: tuple[str, ...]
    target: Target
    mesh: Mesh
    quantization: str
    deployment: str = ""
    phase: str = "mixed"
    published: bool = False
    max_logprobs: int = 0
    weights: str = "none"
    platform: Platform = CPU
    expert_parallel: bool = True
    kv_cache_dtype: str = "auto"
    max_total_tokens: int | None = None
    kv_cache_memory: int | None = None
    decided_by: Decided = field(default=(), compare=False)

    def rules(self, bucket: Bucket | None = None) -> Rules:
        """Layout of a bucket's graph; parameters and state have the same one in every bucket."""
        tokens = bucket.tokens if bucket else self.mesh.axis("tp")
        return sharding_rules.rules(self.mesh, experts=self.model.config.num_experts, expert_parallel=self.expert_parallel, tokens=tokens)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of `npucompile build` that lead to the same plan."""
        options = {setting.option: setting.argument(self) for setting in SETTINGS} | {"decided-by": format_decided(self.decided_by)}
        words = ((f"--{option}", str(value)) for option, value in options.items() if value not in (None, ""))
        return (_model_name(self.source), *(word for pair in words for word in pair))

    @property
    def draft_name(self) -> str:
        """The name or path of the draft model that the model is built with; "" without one."""
        return draft_name(self.source)

    @property
    def own_checkpoint_slots(self) -> int | str:
        """Slots for checkpoints, where they are not what the plan would choose."""
        plain = replace(self.limits, num_slots=self.limits.num_slots - self.limits.checkpoint_slots, checkpoint_slots=0)
        chosen = with_checkpoint_slots(plain, None, self.model, self.target, self.published).checkpoint_slots
        return "" if chosen == self.limits.checkpoint_slots else self.limits.checkpoint_slots

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Token ids that end a response; those outside the vocabulary, which can never be generated, are left out."""
        return tuple(token for token in self.source.eos_ids if token < self.model.config.vocab_size)

    @property
    def references(self) -> tuple[Bucket, ...]:
        """Buckets of one row that are not served but verify the rows of larger ones; none for NPUs, whose graphs do not run here."""
        if not self.target.local:
            return ()
        singles = {Bucket(b.kind, 1, b.q_len) for b in self.buckets}
        return tuple(sorted(singles - set(self.buckets)))

    @cached_property
    def params_bytes(self) -> int:
        """Bytes of one device's parameters."""
        rules = self.rules()
        return sum(local_bytes(p.aval, self.mesh, rules) for _, p in tree.flatten(self.model.params(self.dtype)))

    @property
    def state_bytes(self) -> int:
        """Bytes of one device's state pools."""
        rules = self.rules()
        leaves: list[tuple[str, Aval]] = tree.flatten(self.model.state(self.limits, self.dtype))
        return sum(local_bytes(aval, self.mesh, rules) for _, aval in leaves)


def plan(options: Options) -> Plan:
    """Plans a build.

    Raises:
        SpecError: an option is not legal, or weights and state do not fit in this machine's memory.
        ModelError: the model cannot be used.
        PartitionError: the model cannot be split over the mesh.
    """
    source = registry.find(options.model, FamilyFile.read(options.family) if options.family else None)
    place = {"backend": options.backend, "deployment": options.deployment, "target_name": options.target, "mesh": options.mesh}
    # A directory's name need not be the model's: snapshots of a hub are named by a hash.
    name = registry.published_name(source) if options.deployment else source.name
    row = row_of(name, **place)
    source, draft_note = choose_draft_model(options.draft_model, source, row, options.num_speculative_tokens)
    check_drafts(options.num_speculative_tokens, source)
    instance = resolve(
        name,
        **place,
        phase=options.phase,
        quantization=options.quantization,
        drafts=options.num_speculative_tokens,
        has_draft_head=source.has_draft_head,
    )
    target, mesh = instance.target, instance.mesh
    backend = choose_backend(options.backend, source, instance)
    dtype, dtype_note = choose_dtype(options.dtype, target)
    batches, limits, published = decode_sizes(options, source, instance)
    limits = with_checkpoint_slots(limits, options.checkpoint_slots, source.model, target, published)
    structured = target.structured_outputs if options.structured_outputs is None else options.structured_outputs
    adjustments = target.logit_adjustments if options.logit_adjustments is None else options.logit_adjustments
    vocab_size = source.model.config.vocab_size
    limits = limits.with_bitmasks(structured, vocab_size).with_adjustments(adjustments, vocab_size)
    prefill, dropped = prefill_buckets(options, instance, limits)
    weights, weights_note = choose_weights(options.weights or "auto", source, target, backend)
    platform = _platform(options, target)
    formats = choose_kv_cache(options.kv_cache_dtype, _formats(source, instance), dtype)
    planned = Plan(
        source,
        _variant_of(source.model, formats, instance, platform, backend, draft_vocab(options.draft_vocab_size, source, limits.drafts, mesh)),
        (*prefill, *(Bucket("decode", batch, limits.drafts + 1) for batch in batches)),
        limits,
        dtype,
        backend,
        (),
        target,
        mesh,
        instance.quantization,
        instance.deployment,
        instance.phase,
        published,
        _max_logprobs(options, source, target),
        weights,
        platform,
        instance.expert_parallel,
        options.kv_cache_dtype,
        options.max_total_tokens,
        options.kv_cache_memory,
    )
    planned = within_memory(planned)
    check_kv_cache(planned.model, planned.limits, dtype)
    notes = (
        f"deployment {instance.deployment}, {instance.phase}" if instance.deployment else None,
        dtype_note,
        length_note(options, planned),
        f"no prefill of {', '.join(map(str, dropped))} tokens: longer than the context of {limits.max_model_len}" if dropped else None,
        draft_note,
        drafts_note(options, planned),
        *eos_notes(planned),
        *padding_notes(planned),
        weights_note,
        kv_cache_note(formats),
        *(f"differs from the deployment: {deviation}" for deviation in deviation_notes(planned)),
    )
    planned = replace(planned, decided_by=decided(options, planned, quantised=bool(source.checkpoint_dir) and formats.quantises))
    planned = fit_pool(fit_dispatch(replace(planned, notes=tuple(note for note in notes if note))))
    if target.local:
        _check_memory(planned)
    _check_split(planned)
    return planned


def _platform(options: Options, target: Target) -> Platform:
    """What graphs are lowered for.

    Raises:
        SpecError: a release or operator packages for a target without CANN, or unknown ones.
    """
    if not target.cann and (options.cann or options.operator_packages):
        raise SpecError(f"--cann and --operator-packages are for NPUs, the target is {target.name}; legal are targets that are NPUs")
    return Platform(target.chip, options.cann or target.cann, tuple(sorted(set(options.operator_packages))))


def _formats(source: registry.ModelSource, instance: Instance) -> Formats:
    """The formats of a checkpoint that is quantised, else those of the scheme; a draft model of its own stays float.

    Raises:
        SpecError: a scheme for a checkpoint that is quantised already.
        CheckpointError: the checkpoint's description cannot be read.
    """
    found = formats_in(source.checkpoint_dir, decodes_only=instance.phase == "decode") if source.checkpoint_dir else None
    if found is None:
        found = formats_of_scheme(instance.quantization, registry.published_name(source))
    elif instance.quantization != "none" and not instance.deployment:
        raise SpecError(f"--quantization {instance.quantization}: {source.checkpoint_dir} is quantised already; legal is none")
    return found.floats_first(f"{PREFIX}*") if source.draft and found.quantises else found


def _max_logprobs(options: Options, source: registry.ModelSource, target: Target) -> int:
    most = min(MAX_LOGPROBS, source.model.config.vocab_size)
    count = min(target.max_logprobs, most) if options.max_logprobs is None else options.max_logprobs
    if not 0 <= count <= most:
        raise SpecError(f"max_logprobs is {count}; legal for {source.name} are 0 to {most}")
    return int(count)


def _variant_of(model: step.Model, formats: Formats, instance: Instance, platform: Platform, backend: str, draft_vocab: int) -> step.Model:
    """The model in the variant of that instance; where a tp group has more ranks than key-value heads, the heads are replicated."""
    config, mesh = model.config, instance.mesh
    group = mesh.axis("tp")
    try:
        heads_for(config, group)
    except PartitionError as error:
        raise SpecError(f"mesh {mesh}: {error}") from None
    variant = deployed(
        config,
        formats,
        mesh,
        sharding_rules.rules(mesh, experts=getattr(config, "num_experts", 0), expert_parallel=instance.expert_parallel, tokens=group),
        # vllm-ascend's recurrent operator takes the float32 states that checkpoints ask for; CANN's takes bfloat16 only.
        recurrent=torch.float32 if "vllm-ascend" in platform.packages else instance.target.state_dtype,
        dispatches=instance.target.dispatches,
        local=instance.target.local,
        backend=backend,
        platform=platform,
        draft_vocab=draft_vocab,
    )
    return replace(model, config=replace(config, variant=variant), drafting=instance.drafts > 0)


def _check_split(plan: Plan) -> None:
    """Refuses a model whose parameters or pools do not divide by the mesh."""
    rules = plan.rules()
    params = [(name, param.aval) for name, param in tree.flatten(plan.model.params(plan.dtype))]
    for name, aval in (*params, *tree.flatten(plan.model.state(plan.limits, plan.dtype))):
        rules.check(aval, plan.mesh, name)


def _check_memory(plan: Plan) -> None:
    """Refuses weights and state that exceed this machine's memory; a plan that is not run may have any size."""
    needed, memory = plan.params_bytes + plan.state_bytes, MACHINE_BYTES
    if plan.backend != "null" and needed > memory:
        raise SpecError(
            f"{plan.source.name} needs {plan.params_bytes / 1e9:,.1f} GB for weights and {plan.state_bytes / 1e9:,.1f} GB for state, this "
            f"machine has {memory / 1e9:,.1f} GB; smaller are --max-model-len, --max-num-seqs and --buckets, and --backend null needs none"
        )


def _model_name(source: registry.ModelSource) -> str:
    """The name or absolute path by which `registry.find` finds this model."""
    if source.name in registry.presets() and registry.find(source.name).checkpoint_dir == source.checkpoint_dir:
        return source.name
    return str(Path(source.checkpoint_dir or source.name).resolve())


def default_out(artifacts: Path, source: registry.ModelSource) -> Path:
    """The default directory of a build."""
    return artifacts / source.name
