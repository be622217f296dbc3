"""What a build is asked for, and the plan that it comes to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch

from ...graphs import tree
from ...graphs.types import Aval, Bucket, Limits, Mesh, Rules
from ...lowering.platform import CPU, Platform
from ...models import programs, registry, step
from ...models.sharding_rules import rules_of
from ...server.pictures.processor import PictureProcessor
from ...server.pictures.videos import VideoProcessor
from ..notation import EncodeSize, PrefillSize
from .decisions import Decided, format_decided
from .memory import local_bytes
from .settings.table import SETTINGS
from .targets import Target


@dataclass(frozen=True)
class Options:
    """The options of `npucompile build` (settings/table.py); None leaves the choice to the plan.

    Attributes:
        model: preset name or checkpoint directory.
        decided_by: who decided the settings where a build is repeated by its arguments (tools/builder/decisions.py).
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
    ge_kernels: str | None = None
    no_overlap: bool | None = None
    prefetch_weights: bool | None = None
    operator_packages: tuple[str, ...] = ()
    kv_cache_dtype: str = "auto"
    expert_combine_dtype: str = "auto"
    max_total_tokens: int | None = None
    decided_by: str | None = None
    checkpoint_slots: int | None = None
    kv_cache_memory: int | None = None
    draft_vocab_size: int | None = None
    draft_widths: tuple[int, ...] | None = None
    encode: tuple[EncodeSize, ...] | None = None
    language_model_only: bool | None = None
    expert_map: str | None = None
    expert_counts: bool | None = None
    prefill_cp: int | None = None
    score: tuple[PrefillSize, ...] | None = None


@dataclass(frozen=True)
class Plan:
    """A build. Its choices are made one after the other (plan.py): what has a default here is not chosen yet where a plan begins.

    Attributes:
        options: what was asked for; plans that come to the same are equal.
        source: the model as it was found, and its checkpoint if it has one.
        model: the same in the variant of this build.
        limits: of one dp group.
        notes: choices made for the user, each with its reason.
        published: whether the limits are the deployment's, not derived from a context and a number of requests.
        max_logprobs: number of most likely tokens whose log probabilities a step returns; 0 for none.
        weights: "stored" in the artifact, "bound" to it by reference, or "none".
        platform: what the graphs are lowered for.
        expert_parallel: whether whole experts are spread over all ranks; else each is split over a group.
        pictures, videos: how they are prepared; None in a build that takes none.
        decided_by: who decided each setting; plans that differ in nothing else are equal.
        reasons: sentences with the figures by which the plan decided settings, by their options (tools/builder/answers.py).
    """

    options: Options = field(compare=False, repr=False)
    source: registry.ModelSource
    model: step.Model
    limits: Limits
    target: Target
    mesh: Mesh
    quantization: str
    buckets: tuple[Bucket, ...] = ()
    dtype: torch.dtype = torch.float32
    backend: str = "null"
    notes: tuple[str, ...] = ()
    deployment: str = ""
    phase: str = "mixed"
    published: bool = False
    max_logprobs: int = 0
    weights: str = "none"
    platform: Platform = CPU
    expert_parallel: bool = True
    pictures: PictureProcessor | None = None
    videos: VideoProcessor | None = None
    decided_by: Decided = field(default=(), compare=False)
    reasons: Decided = field(default=(), compare=False)

    def noted(self, *notes: str | None) -> Plan:
        """The plan with further notes; None is none."""
        return replace(self, notes=(*self.notes, *(note for note in notes if note)))

    def rules(self, bucket: Bucket | None = None) -> Rules:
        """Layout of a bucket's graph; parameters and state have the same one in every bucket."""
        return rules_of(self.model.config, self.mesh, bucket, expert_parallel=self.expert_parallel)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of `npucompile build` that lead to the same plan."""
        options = {setting.option: setting.argument(self) for setting in SETTINGS} | {"decided-by": format_decided(self.decided_by)}
        words = ((f"--{option}", *(() if value is True else (str(value),))) for option, value in options.items() if value not in (None, ""))
        return (_model_name(self.source), *(word for option in words for word in option))

    @property
    def draft_name(self) -> str:
        """The name or path of the draft model that the model is built with; "" without one."""
        draft = self.source.draft
        if draft is None:
            return ""
        return str(draft.directory.resolve()) if draft.directory else draft.name

    @property
    def own_checkpoint_slots(self) -> int | str:
        """Slots for checkpoints, where they are not what the plan would choose."""
        limits = self.limits
        chosen = limits.num_request_slots - 1 if self.target.local and not self.published and self.has_states else 0
        return "" if chosen == limits.checkpoint_slots else limits.checkpoint_slots

    @property
    def own_total_tokens(self) -> int | str:
        """Tokens that are cached at once, where this machine decides them and they are not as many as all requests may have."""
        limits = self.limits
        pages, whole = limits.num_pages - 1, (limits.num_request_slots - 1) * limits.pages_per_request
        decided = self.target.local and not self.deployment and self.options.kv_cache_memory is None
        return pages * limits.page_size if decided and pages < whole else ""

    @property
    def has_states(self) -> bool:
        """Whether requests have recurrent states."""
        return has_recurrent_states(self.model, self.limits)

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
        return sum(local_bytes(p.aval, self.mesh, rules) for _, p in tree.flatten(programs.params(self.model, self.dtype)))

    @property
    def state_bytes(self) -> int:
        """Bytes of one device's state pools."""
        rules = self.rules()
        leaves: list[tuple[str, Aval]] = tree.flatten(self.model.state(self.limits, self.dtype))
        return sum(local_bytes(aval, self.mesh, rules) for _, aval in leaves)


def has_recurrent_states(model: step.Model, limits: Limits) -> bool:
    """Whether any pool of the model has a slot a state."""
    return any(aval.axes[0] in ("slots", "first_slots") for _, aval in tree.flatten(model.state(limits, torch.float32)))


def _model_name(source: registry.ModelSource) -> str:
    """The name or absolute path by which `registry.find` finds this model."""
    if source.name in registry.presets() and registry.find(source.name).checkpoint_dir == source.checkpoint_dir:
        return source.name
    return str(Path(source.checkpoint_dir or source.name).resolve())
