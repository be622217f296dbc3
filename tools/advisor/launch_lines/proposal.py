"""Turns what a line says into the arguments of `npucompile build`, and plans them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ....graphs.errors import NpucompileError
from ....graphs.paths import file_named
from ....graphs.types import Limits
from ....models import registry
from ....models.presets import DRAFT_PRESETS
from ...builder import plan as planning
from ...builder.deployments import Deployment, Phase, limits_for, prefill_sizes
from ...builder.fit import fitting_pages
from ...builder.memory import MemoryPlan
from ...builder.planned import has_recurrent_states
from ...builder.rank_memory import planned_memory
from ...builder.settings.model import KV_CACHE_DTYPE, MAX_DRAFTS
from ...builder.settings.place import PREFILL_CP
from ...builder.settings.table import SETTINGS
from ...builder.targets import Target, target
from ...notation import NO_PICTURES, PUBLISHED_ENCODE, format_buckets, format_prefill
from .facts import ASCEND_NODE, LaunchFacts
from .names import preset_of, unread_form
from .published import ENGINES, matching, phase_of

DEFAULT_TARGET = "ascend-a3"
PLACEHOLDER = re.compile(r"\$|<|^x+$|\byour\b|path/to|^MODEL$", re.IGNORECASE)
"""A name of a checkpoint that stands for any."""


@dataclass(frozen=True)
class Proposal:
    """A build for one instance of a line.

    Attributes:
        model: what the build is of: a directory that is here, a preset, or the name in the line where it is neither.
        known: whether that is a model that can be planned here.
        arguments: options of `npucompile build` and their values, by name without dashes.
        target: of the build.
        deployment: the published deployment that the line is, or None.
        also: ids of others that the line is as well.
        assumed: what the line does not say and the build needs, each with what was taken.
        plan: of the build; None where it could not be made.
        memory: of a rank of that plan, without activations; None without a plan, and on this machine.
        problem: why it could not be made, or what is too large for a rank.
    """

    model: str
    known: bool
    arguments: Mapping[str, str]
    target: str
    deployment: Deployment | None = None
    also: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    plan: planning.Plan | None = field(default=None, repr=False)
    memory: MemoryPlan | None = field(default=None, repr=False)
    problem: str = ""

    @property
    def planned(self) -> bool:
        """Whether it is a build that can be made as far as can be known before graphs are."""
        return self.plan is not None and not self.problem

    @property
    def words(self) -> tuple[str, ...]:
        """The arguments of `npucompile build`."""
        return (self.model, *(word for name, value in self.arguments.items() for word in (f"--{name}", value)))


@dataclass(frozen=True)
class Named:
    """What a line says that it launches.

    Attributes:
        model, known: as those of `Proposal`.
        assumed: why it is taken for that model.
        rows: published deployments whose every setting the line has, each with its phase.
    """

    model: str
    known: bool
    assumed: tuple[str, ...]
    rows: tuple[tuple[Deployment, Phase], ...]


def named(facts: LaunchFacts, model: str | None = None, target_name: str | None = None) -> Named:
    """The model of a line, and the deployments that it may be."""
    path = str(facts.values.get("model") or "MODEL")
    chosen = model or (path if _is_here(path) else preset_of(path) or path)
    known = chosen in registry.presets() or _is_here(chosen)
    assumed: list[str] = []
    rows = matching(facts, chosen if known else None, target_name) if known or PLACEHOLDER.search(path) else []
    if not known and len({row.model for row, _ in rows}) == 1:
        chosen, known = rows[0][0].model, True
        assumed.append(f"model {chosen}: the line names none that is known, and every size of it is published for that one")
    elif not known:
        rows = []
    if not known and unread_form(path):
        assumed.append(f"model {path}: in no form that is read; say which with --model")
    elif not known:
        assumed.append(f"model {path}: neither a directory here nor a published model that is known by name; say which with --model")
    elif chosen != path and model is None and not assumed:
        assumed.append(
            f"model {chosen}, by the name of {path}, which is not here: serve takes the directory of the weights with --checkpoint"
        )
    return Named(chosen, known, tuple(assumed), tuple(rows))


def propose(
    facts: LaunchFacts,
    model: str | None = None,
    target_name: str | None = None,
    out: str | None = None,
    among: Collection[str] = (),
    scheme: str | None = None,
) -> Proposal:
    """The build for a line.

    Args:
        model: takes the place of the line's.
        target_name: the machine, where the user says it.
        out: the artifact's directory.
        among: ids of the deployments that the other servers of the script may be; the line is one of those where it can be.
        scheme: of the weights, where another line of the script says it of the same checkpoint.
    """
    found = named(facts, model, target_name)
    rows = [each for each in found.rows if each[0].id in among] or list(found.rows)
    assumed = list(found.assumed)
    if len({(row.quantization, row.npus, row.model) for row, _ in rows}) == 1:
        return _published(facts, found.model, rows, found.assumed, out)
    if rows:
        those = ", ".join(f"{row.id} ({row.quantization}, {row.npus} NPUs)" for row, _ in rows)
        assumed.append(f"no deployment: {those} have these flags, and the line says neither which weights nor how many instances it has")
    machine, why = _target(facts, target_name)
    if why:
        assumed.append(why)
    return _checked(_derived(facts, found.model, found.known, machine, assumed, out, scheme))


def _is_here(path: str) -> bool:
    """Whether a text is the directory of a checkpoint."""
    return file_named(Path(path) / "config.json") is not None


def _target(facts: LaunchFacts, name: str | None) -> tuple[Target, str]:
    """The machine, and why where the line does not say it."""
    if name is not None:
        return target(name), ""
    if facts.values.get("device") == "cpu":
        return target("cpu"), ""
    if facts.npus_per_node() > ASCEND_NODE:
        return target("ascend-a3"), ""
    return target(
        DEFAULT_TARGET
    ), f"target {DEFAULT_TARGET}: {facts.npus_per_node()} NPUs on a machine may be an A2 too (--target ascend-a2)"


def _published(facts: LaunchFacts, model: str, rows: list[tuple[Deployment, Phase]], assumed: tuple[str, ...], out: str | None) -> Proposal:
    row = rows[0][0]
    arguments = (
        {"deployment": row.id} | ({"phase": facts.role} if facts.role != "mixed" else {}) | _precision(facts, registry.find(row.model))
    )
    arguments |= _pictures(facts, registry.find(row.model))
    if out:
        arguments["out"] = out
    also = tuple(other.id for other, _ in rows[1:])
    if also:
        differ = "the machine" if len({other.target for other, _ in rows}) > 1 else "the lengths of requests"
        assumed += (f"deployment {row.id}: {', '.join(also)} have the same flags and differ in {differ}; name one with --deployment",)
    return _checked(_planned(Proposal(model, True, arguments, row.target, row, also, assumed)))


def _derived(
    facts: LaunchFacts, model: str, known: bool, machine: Target, assumed: list[str], out: str | None, scheme: str | None
) -> Proposal:
    """A build of the line's own sizes, derived as those of a published deployment are."""
    source = None
    if known:
        source = registry.find(model)
        assumed += _context_note(facts, source)
    draft = _draft(facts, model)
    drafts = _drafts(facts, source, draft)
    scheme = "none" if scheme == "bf16" else scheme or facts.scheme
    # A prefill server runs no decode steps, and a build has one bucket of them at least.
    decode = (1,) if facts.role == "prefill" else facts.buckets
    arguments = {"target": machine.name, "mesh": str(facts.mesh)}
    if scheme not in (None, "none") and (source is None or source.checkpoint_dir is None):
        arguments["quantization"] = str(scheme)
    if not decode:
        assumed.append("buckets: the line bounds no batch; those of a build by default are taken (--buckets)")
    if facts.role != "mixed":
        assumed.append("phase: no published deployment has these sizes, so the build has both; this server does one of them")
    if facts.prefill_cp == facts.mesh.axis("tp") > 1:
        arguments[PREFILL_CP.option] = str(facts.prefill_cp)
    if decode:
        arguments["buckets"] = format_buckets(decode[-512:])
    phase = replace(phase_of(facts), name="mixed", num_speculative_tokens=drafts, buckets=decode)
    longest = source.max_position_embeddings if source else facts.context
    if longest is not None:
        context = min(facts.context or longest, longest) // machine.page_size * machine.page_size
        phase = replace(phase, context_len=max(context, machine.page_size))
        row = Deployment("", model, ENGINES[facts.engine], machine.name, quantization="", source="", phases={"mixed": phase})
        limits = limits_for(row, phase, machine.page_size)
        sizes = prefill_sizes(row)
        arguments["prefill"] = format_prefill([size._replace(tokens=min(size.tokens, limits.max_model_len)) for size in sizes])
        arguments["max-model-len"] = str(limits.max_model_len)
        if facts.group_requests:
            requests = phase.group_requests
            arguments["max-num-seqs"] = str(requests)
            if limits.num_pages - 1 < requests * limits.pages_per_request and facts.number("pool_bytes") is None:
                arguments["max-total-tokens"] = str((limits.num_pages - 1) * limits.page_size)
    arguments["speculative-tokens"] = str(drafts)
    arguments |= _kept_states(facts, source, machine) | _pictures(facts, source)
    arguments |= draft | _precision(facts, source)
    if out:
        arguments["out"] = out
    return _fitted(_planned(Proposal(model, known, arguments, machine.name, assumed=tuple(assumed))))


def _checked(proposal: Proposal) -> Proposal:
    """The proposal with the memory of a rank as far as it is known before graphs are, which may be too much."""
    plan = proposal.plan
    if plan is None or plan.target.local:
        return proposal
    memory = planned_memory(plan)
    try:
        memory.check()
    except NpucompileError as error:
        return replace(proposal, memory=memory, problem=str(error))
    return replace(proposal, memory=memory)


def _context_note(facts: LaunchFacts, source: registry.ModelSource) -> list[str]:
    if facts.context is None:
        return [f"context: the line names none, which means the model's own, {source.max_position_embeddings} tokens (--max-model-len)"]
    return []


def _drafts(facts: LaunchFacts, source: registry.ModelSource | None, draft: Mapping[str, str]) -> int:
    """Drafts of a step; 0 where the head that the line asks for is not there."""
    own = source is None or (source.has_draft_head and not facts.eagle)
    return min(facts.drafts, MAX_DRAFTS) if own or draft else 0


def _heads() -> dict[str, str]:
    """Presets of draft models by the preset that they draft for."""
    return {str(preset["target"]): name for name, preset in DRAFT_PRESETS.items()}


def _draft(facts: LaunchFacts, model: str) -> dict[str, str]:
    """The draft model of the line: its directory where it is here, else the preset for the model if the line wants an EAGLE-3 head."""
    if not facts.drafts:
        return {}
    path = facts.draft_path
    if path and path != facts.values.get("model") and _is_here(path):
        return {"draft-model": path}
    return {"draft-model": _heads()[model]} if facts.eagle and model in _heads() else {}


def _kept_states(facts: LaunchFacts, source: registry.ModelSource | None, machine: Target) -> dict[str, str]:
    """Slots for states of prefixes, where the line wants prefixes kept and the model has states: builds for NPUs have none by default.

    Those of SGLang's option are of all dp groups and of requests in flight, too; where there is no number, a request in flight has one.
    """
    limits = Limits(machine.page_size, 2, 2, machine.page_size, 1, 0)
    total, requests = facts.number("state_slots"), facts.group_requests
    if source is None or machine.local or facts.has("no_prefixes_kept") or not has_recurrent_states(source.model, limits):
        return {}
    # Where the line bounds no requests, those of a build by default are in flight.
    kept = requests or max(facts.buckets or machine.buckets) if facts.values.get("prefix_caching") is True else None
    if total is not None:
        kept = max(total // facts.mesh.axis("dp") - (requests or 0), 0)
    return {"checkpoint-slots": str(kept)} if kept else {}


def _pictures(facts: LaunchFacts, source: registry.ModelSource | None) -> dict[str, str]:
    """Encode sizes where the line says that pictures are taken, whose sizes it leaves open, or that none are."""
    if source is None or source.tower is None or facts.role == "decode" or facts.pictures is None:
        return {}
    return {"encode": PUBLISHED_ENCODE if facts.pictures else NO_PICTURES}


def cache_of(facts: LaunchFacts, source: registry.ModelSource | None) -> str:
    """`--kv-cache-dtype` of a model by vllm-ascend's switches; "" where they say nothing, or what no build does."""
    latents, keys = facts.c8
    if (latents, keys) == (None, None) or not (source is None or hasattr(source.model.config, "index_topk")):
        return ""
    return {(True, True): "int8", (False, True): "int8-indexer", (False, False): "bfloat16"}.get((bool(latents), bool(keys)), "")


def _precision(facts: LaunchFacts, source: registry.ModelSource | None) -> dict[str, str]:
    """Types and memory that the line says."""
    arguments = {KV_CACHE_DTYPE.option: cache} if (cache := cache_of(facts, source)) else {}
    if facts.values.get("kv_cache_dtype") in ("int8", "bfloat16", "bf16"):
        arguments[KV_CACHE_DTYPE.option] = {"bf16": "bfloat16"}.get(facts.values["kv_cache_dtype"], facts.values["kv_cache_dtype"])
    if facts.values.get("dtype") == "bfloat16":
        arguments["dtype"] = "bfloat16"
    if (memory := facts.number("pool_bytes")) is not None:
        arguments["kv-cache-memory"] = str(memory)
    if (most := facts.number("max_logprobs")) is not None and 0 <= most <= 20:
        arguments["max-logprobs"] = str(most)
    return arguments


def _planned(proposal: Proposal) -> Proposal:
    """The proposal with its plan, or with why there is none."""
    if not proposal.known:
        return proposal
    try:
        return replace(proposal, plan=planning.plan(options_of(proposal)))
    except NpucompileError as error:
        return replace(proposal, problem=str(error))


def options_of(proposal: Proposal) -> planning.Options:
    """The proposal as the plan reads it."""
    given = {each.name: each.value_of(proposal.arguments[each.option]) for each in SETTINGS if each.option in proposal.arguments}
    return planning.Options(proposal.model, **given)


def _fitted(proposal: Proposal) -> Proposal:
    """The proposal with as many cached tokens as a rank has memory for, where its requests need more."""
    plan = proposal.plan
    if plan is None:
        return proposal
    pages = fitting_pages(plan)
    if pages >= plan.limits.num_pages - 1:
        return proposal
    tokens = pages * plan.limits.page_size
    note = f"{tokens} cached tokens a dp group: all requests at full length need {(plan.limits.num_pages - 1) * plan.limits.page_size}"
    arguments = {name: value for name, value in proposal.arguments.items() if name != "kv-cache-memory"} | {"max-total-tokens": str(tokens)}
    return _planned(replace(proposal, arguments=arguments, assumed=(*proposal.assumed, note)))
