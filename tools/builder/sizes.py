"""Decides decode batch sizes, prefill sizes and the limits of a dp group."""

from __future__ import annotations

from dataclasses import replace

from ...graphs.errors import SpecError
from ...graphs.steps.kind import StepKind
from ...graphs.steps.prefill import PREFILL
from ...graphs.steps.score import SCORE
from ...graphs.types import Limits
from ...lowering.backend import backend
from ...models import registry
from ..notation import PrefillSize, format_prefill
from .deployments import deployment, prefill_sizes
from .instance import PlannedInstance
from .planned import Options, Plan
from .settings.sizes import ANY_SIZE_PREFILL


def decode_sizes(options: Options, source: registry.ModelSource, instance: PlannedInstance) -> tuple[list[int], Limits, bool]:
    """Decode batch sizes (none for a prefill instance), limits, and whether those are the deployment's.

    Raises:
        SpecError: sizes that contradict each other or the model.
    """
    page, row = instance.target.page_size, instance.limits
    longest = source.max_position_embeddings // page * page
    requests = row.num_request_slots - 1 if row else 0
    if instance.phase == "prefill":
        batches: list[int] = []
        sequences = options.max_num_seqs or requests
    else:
        sizes = _default_sizes(options, instance) if options.buckets is None else options.buckets
        batches, sequences = _batches(sizes, options.max_num_seqs)
    if row and options.max_model_len is None and options.max_num_seqs is None:
        requests = max(requests, sequences)
        slots, pages = 1 + requests * row.slots_per_request + row.checkpoint_slots, max(row.num_pages, 1 + requests)
        published = replace(row, num_pages=pages, num_slots=slots, max_model_len=min(row.max_model_len, longest))
        return batches, _capped(published, options.max_total_tokens), True
    default = row.max_model_len if row else instance.target.max_model_len
    length = min(default, longest) if options.max_model_len is None else options.max_model_len
    if not page <= length <= longest or length % page:
        raise SpecError(
            f"max_model_len is {length}; legal for {source.name} on {instance.target.name} is a multiple of {page} up to {longest}"
        )
    slots = 1 if instance.phase == "prefill" else instance.drafts + 1
    limits = Limits(page, 1 + sequences * (length // page), 1 + sequences * slots, length, slots, instance.drafts)
    return batches, _capped(limits, options.max_total_tokens), False


def _default_sizes(options: Options, instance: PlannedInstance) -> tuple[int, ...]:
    """Sizes of the deployment or the target; on this machine no more rows than there are requests."""
    sizes, most = instance.buckets or instance.target.buckets, options.max_num_seqs
    if most is None or not instance.target.local or instance.limits:
        return sizes
    return tuple(size for size in sizes if size <= most)


def choose_chunks(plan: Plan) -> Plan:
    """The plan with its prefill and score buckets before its decode buckets, smallest first; sizes that exceed the context are left out.

    Raises:
        SpecError: no prompt fits the context, or a step has more prompts than there are requests in flight; or score buckets of an
            instance that hands prompts over or takes them, or beside steps that give no log probabilities.
    """
    options = plan.options
    if options.score and (plan.phase != "mixed" or options.max_logprobs == 0):
        what = "--max-logprobs 0" if options.max_logprobs == 0 else f"phase {plan.phase}"
        raise SpecError(f"--score {format_prefill(options.score)} and {what}; legal is one of both")
    prefill = _default_prefill(plan) if options.prefill is None else options.prefill
    if prefill or options.prefill is not None:
        plan = _with_chunks(plan, PREFILL, prefill)
    return _with_chunks(plan, SCORE, options.score) if options.score else plan


def _with_chunks(plan: Plan, kind: StepKind, sizes: tuple[PrefillSize, ...]) -> Plan:
    requests, length = plan.limits.num_request_slots - 1, plan.limits.max_model_len
    sizes = tuple(sorted(set(sizes)))
    fitting = [size for size in sizes if size.tokens <= length]
    if not fitting:
        named = ",".join(map(str, sizes))
        raise SpecError(f"no {kind.name} of {named} tokens fits max_model_len {length}; legal are sizes from 1 to {length}")
    most = max(fitting, key=lambda size: size.prompts)
    if most.prompts > requests:
        raise SpecError(
            f"--{kind.name} {most} takes {most.prompts} prompts a step, and {requests} requests are in flight; legal are up to that"
        )
    if plan.model.config.variant.sliced and (odd := [size for size in fitting if size.tokens % (2 * plan.mesh.axis("tp"))]):
        even = 2 * plan.mesh.axis("tp")
        why = f"each of --prefill-cp {even // 2} ranks has two slices of a chunk"
        raise SpecError(f"--{kind.name} {odd[0]}: {why}; legal are multiples of {even}")
    buckets = sorted(kind.bucket(size.prompts, size.tokens) for size in fitting)
    longer = ", ".join(str(size) for size in sizes if size not in fitting)
    note = f"no {kind.name} of {longer} tokens: longer than the context of {length}" if longer else None
    return replace(plan, buckets=(*buckets, *plan.buckets)).noted(note)


def _default_prefill(plan: Plan) -> tuple[PrefillSize, ...]:
    """Sizes of the deployment or the target, as far as limits have room for them; none for an instance that only decodes."""
    if plan.phase == "decode":
        return ()
    # Whatever the sizes of a bucket of this kind: the backend has samples of those that it compiles once for all.
    any_size = plan.mesh.size == 1 and bool(backend(plan.backend).samples(PREFILL.bucket(1, ANY_SIZE_PREFILL[0].tokens)))
    sizes = ANY_SIZE_PREFILL if any_size else plan.target.prefill
    if plan.deployment:
        sizes = prefill_sizes(deployment(plan.deployment))
    requests, length = plan.limits.num_request_slots - 1, plan.limits.max_model_len
    return tuple(PrefillSize(min(size.tokens, length), min(size.prompts, requests)) for size in sizes)


def choose_checkpoint_slots(plan: Plan) -> Plan:
    """The plan with state slots for the states after prefixes that a server keeps (runtime/scheduler/checkpoints.py).

    By default there is one for each request in flight, on this machine; a deployment has those that its shared prefix needs, and a build
    for NPUs those that memory has room for (answers.py). Slots of requests that are not in flight serve too.

    Raises:
        SpecError: slots for a model without recurrent states.
    """
    limits, asked = plan.limits, plan.options.checkpoint_slots
    needed, plain = limits.checkpoint_slots, replace(limits, num_slots=limits.num_slots - limits.checkpoint_slots, checkpoint_slots=0)
    if not plan.has_states:
        if asked:
            name = plan.source.name
            raise SpecError(f"--checkpoint-slots {asked}: {name} has no recurrent states, whose prefixes need pages only; legal is 0")
        return replace(plan, limits=plain)
    default = needed if plan.published else limits.num_request_slots - 1 if plan.target.local else 0
    count = default if asked is None else asked
    return replace(plan, limits=replace(plain, num_slots=plain.num_slots + count, checkpoint_slots=count))


def choose_adjusted(plan: Plan) -> Plan:
    """The plan with how many requests of a step may follow a grammar, and have biases and penalties."""
    options, target, vocab_size = plan.options, plan.target, plan.source.model.config.vocab_size
    structured = target.structured_outputs if options.structured_outputs is None else options.structured_outputs
    adjustments = target.logit_adjustments if options.logit_adjustments is None else options.logit_adjustments
    return replace(plan, limits=plan.limits.with_bitmasks(structured, vocab_size).with_adjustments(adjustments, vocab_size))


def say_length(plan: Plan) -> Plan:
    """The plan for NPUs, which says so where requests are shorter than the model can take, also those of a published deployment."""
    length, longest = plan.limits.max_model_len, plan.source.max_position_embeddings
    if plan.target.local or length >= longest or (plan.options.max_model_len is not None and not plan.deployment):
        return plan
    room = "" if plan.deployment else "state has room for all of it; "
    return plan.noted(f"context {length} of {longest} tokens ({room}--max-model-len to change)")


def _capped(limits: Limits, tokens: int | None) -> Limits:
    """Limits with pages for at most so many cached tokens."""
    if tokens is None:
        return limits
    if tokens < limits.max_model_len:
        raise SpecError(f"--max-total-tokens {tokens}: one request may have {limits.max_model_len} tokens; legal is at least that many")
    return replace(limits, num_pages=min(limits.num_pages, 1 + tokens // limits.page_size))


def _batches(sizes: tuple[int, ...], most: int | None) -> tuple[list[int], int]:
    """Decode batch sizes in order, and the number of requests in flight."""
    batches = sorted(set(sizes))
    if not batches:
        raise SpecError("no decode buckets; legal is at least one batch size, as in --buckets 1,2,4")
    sequences = batches[-1] if most is None else most
    if sequences < batches[-1]:
        raise SpecError(f"max_num_seqs is {sequences} and the largest bucket has {batches[-1]} rows; legal is at least that many")
    return batches, sequences
