"""Decides, for NPUs, what options leave open and graphs tell: pictures, context, states of prefixes, draft widths, kinds of answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...graphs.passes.optimise import optimise
from ...graphs.spmd.partition import partition
from ...graphs.steps.table import kind_of
from ...graphs.types import Bucket
from ...lowering.ascend.cost.estimate import estimate
from ...lowering.ascend.cost.parameters import parameters
from ...lowering.ascend.shipped import ENCODINGS
from ...lowering.backend import CompiledFile, backend
from ...models.step import sampling
from ...runtime.scheduler.draft_widths import CLEARLY
from ..notation import DEFAULT_ENCODE
from .decisions import changed, read_decided
from .defaults import TYPICAL
from .deployments import deployment
from .driver import taken
from .memory import GIB
from .plan import plan as planned
from .planned import Plan
from .pool import THREADS, CompileJob, CompileResult, rewriting, run
from .rank_memory import partitioned_memory, planned_memory
from .settings.model import DRAFT_WIDTHS, LOGIT_ADJUSTMENTS, LOGPROBS, default_widths
from .settings.record import PLAN, Setting
from .settings.sizes import CHECKPOINT_SLOTS, ENCODE, MAX_MODEL_LEN
from .settings.table import EXPLAINED
from .targets import target

MOST_SHARE = 0.02
"""Of a decode step's time, that a kind of answer may cost everybody to be there for those who ask for it."""

SPARE = 16
"""One part in so many of a rank's memory is left to what only a device knows: fragments, and workspace of kernels beyond the allowance."""

ACCEPTED = 0.5
"""Share of drafts behind accepted ones, of the less easy texts: steps of published deployments give 1.7 to 3.2 tokens of four."""

Choice = tuple[Setting, Any, str]
"""A setting, its value, and a sentence with the figure that decided it."""


@dataclass
class Priced:
    """Steps by which answers are decided.

    Attributes:
        cache_dir: of compilers.
        made: results of those that were made: builds that have the same steps take them.
    """

    cache_dir: Path
    made: list[CompileResult] = field(default_factory=list)

    def step_ms(self, plan: Plan, bucket: Bucket) -> float:
        """What a step is estimated to take while requests have half of `TYPICAL` tokens cached."""
        ready = taken(plan, self.made)
        if bucket not in ready:
            self.cache_dir.mkdir(parents=True, exist_ok=True)
            ready[bucket] = run(CompileJob(plan, bucket, self.cache_dir))
            self.made.append(ready[bucket])
        return _estimated_ms(plan, ready[bucket].compiled)

    def sampling_ms(self, plan: Plan, bucket: Bucket) -> float:
        """What a step takes of that to sample."""
        with rewriting():
            program = sampling(plan.model, bucket, plan.limits, plan.dtype, max_logprobs=plan.max_logprobs)
            lowers = backend(plan.backend)
            lowers.prepare(self.cache_dir)
            lowered = lowers.lower(optimise(partition(program, plan.mesh, plan.rules(bucket))), plan.platform)
            return _estimated_ms(plan, lowers.compile(lowered, cache_dir=self.cache_dir, threads=THREADS))


def _estimated_ms(plan: Plan, compiled: CompiledFile | None) -> float:
    assert compiled is not None, "a backend whose graphs are read compiles every bucket"
    context = min(plan.limits.max_model_len, TYPICAL) // 2
    graph = ENCODINGS[plan.backend].decode(compiled.data)
    return estimate(graph, parameters(plan.platform.chip), plan.mesh, context, plan.platform).step_ms


def answer(plan: Plan, priced: Priced) -> Plan:
    """The plan of a build for NPUs with its defaults, each with the figure that decided it; that of another build as it is.

    What a published deployment says stays as it says; what it says nothing of is decided as for any build. A build that is repeated by its
    arguments decides again what the plan had decided, by the same figures.
    """
    if plan.target.local or not plan.buckets:
        return plan
    return _widen(_price(_fit(_take_pictures(_undecided(plan))), priced), priced)


def _undecided(plan: Plan) -> Plan:
    """The plan without what it decided, where the build is repeated by its arguments."""
    options = plan.options
    if not options.decided_by:
        return plan
    by, sized = read_decided(options.decided_by), () if plan.deployment else (MAX_MODEL_LEN, CHECKPOINT_SLOTS, DRAFT_WIDTHS)
    settings = (*((ENCODE,) if options.encode else ()), *sized, LOGPROBS, LOGIT_ADJUSTMENTS)
    left_open: dict[str, Any] = {setting.name: None for setting in settings if by[setting.option] == PLAN}
    return planned(replace(options, **left_open))


def _take_pictures(plan: Plan) -> Plan:
    """Takes pictures where the deployment does, a rank has room for the tower, and the checkpoint, if there is one, has it."""
    source, options = plan.source, plan.options
    if not plan.deployment or not deployment(plan.deployment).pictures or plan.phase == "decode":
        return plan
    if options.encode is not None or options.language_model_only or not (source.has_tower() if source.checkpoint_dir else source.tower):
        return plan
    made = _again(plan, [(ENCODE, DEFAULT_ENCODE, f"Deployment {plan.deployment} takes pictures, of sizes that it does not say.")])
    return made if planned_memory(made).fits else plan


def _fit(plan: Plan) -> Plan:
    """Takes the longest context that all requests have room for at once, beside a state of a prefix for each where there are states.

    A deployment decides these itself. The context is a power of two of pages or the model's own, and never shorter than the target's
    default, which the driver refuses where it does not fit.
    """
    options, limits, page = plan.options, plan.limits, plan.limits.page_size
    longer = (options.max_model_len, options.max_total_tokens, options.kv_cache_memory) == (None, None, None)
    states = plan.has_states and options.checkpoint_slots is None
    if plan.deployment or not (longer or states):
        return plan
    found, requests, pages = partitioned_memory(plan), limits.num_request_slots - 1, limits.num_pages - 1
    free = found.limit_bytes - found.limit_bytes // SPARE - found.total_bytes + pages * found.page_bytes
    left = f"of the {free / GIB:.1f} GiB that weights, workspace and a spare 1/{SPARE} leave of a rank"
    slots = max(min(requests, (free - pages * found.page_bytes) // found.slot_bytes), 0) if states else 0
    taken = f"They take {slots * found.slot_bytes / GIB:.1f} {left}, and there is at most one for each request in flight."
    kept: list[Choice] = [(CHECKPOINT_SLOTS, slots, taken)] if states else []
    most = (free - slots * found.slot_bytes) // (requests * found.page_bytes) if found.page_bytes else 0
    for length in _lengths(plan, most) if longer else ():
        held = f"{requests} requests of {length} tokens take {requests * length // page * found.page_bytes / GIB:.1f} {left}"
        made = _again(plan, [*kept, (MAX_MODEL_LEN, length, f"{held}; the model takes {plan.source.max_position_embeddings}.")])
        # Tables of pages grow with the context, and so do values of kernels; with little memory free, experts get fewer tokens at once.
        if made.model.config.variant == plan.model.config.variant and partitioned_memory(made).fits:
            return made
    if longer and found.page_bytes and limits.max_model_len + page <= plan.source.max_position_embeddings:
        twice = f"twice of it for {requests} requests takes {2 * pages * found.page_bytes / GIB:.1f} {left}"
        kept.append((MAX_MODEL_LEN, limits.max_model_len, f"It is the least: {twice}, beside what exchanges of experts take."))
    return _again(plan, kept)


def _lengths(plan: Plan, most: int) -> Iterable[int]:
    """Contexts to try, the longest first: all that the model takes, then powers of two of pages, longer than the plan's.

    Args:
        most: pages that each request may have.
    """
    page, longest = plan.limits.page_size, plan.source.max_position_embeddings // plan.limits.page_size
    tried = [longest, *(1 << power for power in reversed(range(longest.bit_length())))] if plan.limits.num_pages > 1 else []
    return (pages * page for pages in tried if plan.limits.pages_per_request < pages <= min(most, longest))


def _widen(plan: Plan, priced: Priced) -> Plan:
    """Adds narrower decode steps that give more tokens in a ms than the widest at the largest batch, if drafts are accepted by `ACCEPTED`.

    Which are run, a server decides (runtime/scheduler/draft_widths.py). A deployment decides its drafts itself.
    """
    decode = [bucket for bucket in plan.buckets if kind_of(bucket).decodes]
    left_open = plan.options.draft_widths is None and not plan.deployment and not plan.has_states
    if not (left_open and plan.limits.drafts and decode) or plan.backend not in ENCODINGS:
        return plan
    widest, most = decode[-1], decode[-1].q_len
    ms = {most: priced.step_ms(plan, widest)}
    for width in default_widths(True, plan.limits.drafts)[:-1]:
        narrower = _again(plan, [(DRAFT_WIDTHS, (width, most), "")])
        ms[width] = priced.step_ms(narrower, replace(widest, q_len=width))
    tokens = {width: sum(ACCEPTED**place for place in range(width)) for width in ms}
    chosen = tuple(width for width in sorted(ms) if width == most or tokens[width] / ms[width] > CLEARLY * tokens[most] / ms[most])
    if len(chosen) == 1:
        return plan
    steps = ", ".join(f"a step of {width} {ms[width]:.1f} ms for {tokens[width]:.2f} tokens" for width in chosen)
    why = f"By the cost model {widest.batch} requests take, with {ACCEPTED:.0%} of drafts accepted, {steps}."
    return _again(plan, [(DRAFT_WIDTHS, chosen, why)])


def _price(plan: Plan, priced: Priced) -> Plan:
    """Has steps return log probabilities and take adjustments, as on this machine, where either costs at most `MOST_SHARE` of a step."""
    local = target("cpu")
    counts = ((LOGPROBS, min(local.max_logprobs, plan.source.model.config.vocab_size)), (LOGIT_ADJUSTMENTS, local.logit_adjustments))
    asked = [
        (each, count) for each, count in counts if getattr(plan.options, each.name) is None and not (each is LOGPROBS and plan.max_logprobs)
    ]
    if not asked or plan.backend not in ENCODINGS:
        return plan
    # The largest: its rows cost most, while what all rows share costs no more. An instance that only prefills has no decode step.
    steps = [bucket for bucket in plan.buckets if not kind_of(bucket).tower]
    bucket = max([bucket for bucket in steps if kind_of(bucket).decodes] or steps, key=lambda bucket: bucket.tokens)
    without, plans = priced.sampling_ms(plan, bucket), [_again(plan, [(setting, count, "")]) for setting, count in asked]
    more = [priced.sampling_ms(made, bucket) - without for made in plans]
    # Most builds return log probabilities and take no adjustments: the whole step is one of theirs.
    likely, own = (plans[0], more[0]) if asked[0][0] is LOGPROBS else (plan, 0.0)
    plain, choices = priced.step_ms(likely, bucket) - own, []
    for (setting, count), ms in zip(asked, more, strict=True):
        share = ms / plain
        cost = f"{count} {'cost' if share <= MOST_SHARE else 'would cost'} {share:.2%} of the {plain:.1f} ms of {bucket.name}"
        why = f"By the cost model {cost}; up to {MOST_SHARE:.0%} is taken."
        choices.append((setting, count if share <= MOST_SHARE else 0, why))
    return _again(plan, choices)


def _again(plan: Plan, choices: Sequence[Choice]) -> Plan:
    """The plan with these choices, and its own."""
    made = planned(replace(plan.options, **{setting.name: value for setting, value, _ in choices}))
    reasons = {**dict(plan.reasons), **{setting.option: why for setting, _, why in choices}}
    notes = (f"{option} {EXPLAINED[option].argument(made)}: {why} (--{option} to change)" for option, why in reasons.items())
    return replace(made, decided_by=changed(made.decided_by, *reasons), reasons=tuple(reasons.items())).noted(*notes)
