"""Plans a build: decides and checks model, buckets, sizes and memory before anything is traced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ...graphs.steps.decode import DECODE
from ...models import registry
from ...models.family_file import FamilyFile
from .decisions import decided
from .defaults import fit_machine
from .drafts import check_drafts, choose_draft_model, decode_widths, say_drafts
from .fit import check_memory, check_split, fit_dispatch, fit_pool, within_memory
from .instance import choose_backend, choose_platform, resolve, row_of
from .notes import say_deviations, say_ends
from .pictures import choose_encode
from .planned import Options, Plan
from .precision import check_kv_cache, choose_dtype, choose_formats, choose_logprobs, choose_weights
from .settings.table import SETTINGS
from .sizes import choose_adjusted, choose_checkpoint_slots, choose_chunks, decode_sizes, say_length

__all__ = ["Options", "Plan", "default_out", "plan"]


def say_who(plan: Plan) -> Plan:
    """The plan with who decided each setting."""
    quantised = bool(plan.source.checkpoint_dir) and plan.model.config.variant.formats.quantises
    return replace(plan, decided_by=decided(plan, quantised=quantised))


RULES: tuple[Callable[[Plan], Plan], ...] = (
    *(choose_backend, choose_platform, choose_dtype, choose_formats, fit_machine, say_length, choose_checkpoint_slots, choose_adjusted),
    *(
        choose_chunks,
        say_drafts,
        choose_encode,
        say_ends,
        choose_weights,
        within_memory,
        check_kv_cache,
        choose_logprobs,
        say_deviations,
        say_who,
    ),
    *(fit_dispatch, fit_pool, check_memory, check_split),
)
"""Each decides settings of a plan whose place and limits are known, by what those before it decided."""


def plan(options: Options) -> Plan:
    """Plans a build.

    Raises:
        SpecError: an option is not legal, or weights and state do not fit in this machine's memory.
        ModelError: the model cannot be used.
        PartitionError: the model cannot be split over the mesh.
    """
    for setting in SETTINGS:
        setting.check(getattr(options, setting.name))
    planned = _begin(options)
    for rule in RULES:
        planned = rule(planned)
    return planned


def _begin(options: Options) -> Plan:
    """The plan with its model, its place and its limits."""
    source = registry.find(options.model, FamilyFile.read(options.family) if options.family else None)
    # A directory's name need not be the model's: snapshots of a hub are named by a hash.
    name = registry.published_name(source) if options.deployment else source.name
    drafts = options.num_speculative_tokens
    source = choose_draft_model(options.draft_model, source, row_of(name, options), drafts)
    check_drafts(drafts, source)
    instance = resolve(options, name, source.has_draft_head)
    batches, limits, published = decode_sizes(options, source, instance)
    return Plan(
        options,
        source,
        source.model,
        limits,
        instance.target,
        instance.mesh,
        instance.quantization,
        tuple(DECODE.bucket(batch, width) for batch in batches for width in decode_widths(options, source, instance, limits)),
        notes=(f"deployment {instance.deployment}, {instance.phase}",) if instance.deployment else (),
        deployment=instance.deployment,
        phase=instance.phase,
        published=published,
        expert_parallel=instance.expert_parallel,
    )


def default_out(artifacts: Path, source: registry.ModelSource) -> Path:
    """The default directory of a build."""
    return artifacts / source.name
