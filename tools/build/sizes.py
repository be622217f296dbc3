"""Decode batch sizes, prefill sizes and limits of a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ...graphs.errors import SpecError
from ...graphs.types import Bucket, Limits
from ...models import registry
from ..notation import PrefillSize
from .choices import DEFAULT_BUCKETS
from .instance import Instance

if TYPE_CHECKING:
    from .plan import Options


def decode_sizes(options: Options, source: registry.ModelSource, instance: Instance) -> tuple[list[int], Limits, bool]:
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
        sizes = instance.buckets or DEFAULT_BUCKETS if options.buckets is None else options.buckets
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


def _capped(limits: Limits, tokens: int | None) -> Limits:
    """Limits with pages for at most so many cached tokens.

    Raises:
        SpecError: they would not hold one request.
    """
    if tokens is None:
        return limits
    if tokens < limits.max_model_len:
        raise SpecError(f"--max-total-tokens {tokens}: one request may have {limits.max_model_len} tokens; legal is at least that many")
    return replace(limits, num_pages=min(limits.num_pages, 1 + tokens // limits.page_size))


def _batches(sizes: tuple[int, ...], most: int | None) -> tuple[list[int], int]:
    """Decode batch sizes in order, and the number of requests in flight.

    Raises:
        SpecError: there are no sizes, or one is larger than the number of requests.
    """
    batches = sorted(set(sizes))
    if not batches:
        raise SpecError("no decode buckets; legal is at least one batch size, as in --buckets 1,2,4")
    sequences = batches[-1] if most is None else most
    if sequences < batches[-1]:
        raise SpecError(f"max_num_seqs is {sequences} and the largest bucket has {batches[-1]} rows; legal is at least that many")
    return batches, sequences


def prefill_buckets(options: Options, instance: Instance, limits: Limits) -> tuple[tuple[Bucket, ...], list[PrefillSize]]:
    """Prefill buckets, smallest first, and the requested sizes whose prompts exceed the context.

    Raises:
        SpecError: no prompt fits the context, or a step has more prompts than there are requests in flight.
    """
    default, length = instance.target.prefill if instance.prefill is None else instance.prefill, limits.max_model_len
    requests = limits.num_request_slots - 1
    if options.prefill is None and not default:
        return (), []
    cut = tuple(PrefillSize(min(size.tokens, length), min(size.prompts, requests)) for size in default)
    sizes = sorted(set(cut if options.prefill is None else options.prefill))
    fitting = [size for size in sizes if size.tokens <= length]
    if not fitting:
        named = ",".join(map(str, sizes))
        raise SpecError(f"no prefill of {named} tokens fits max_model_len {length}; legal are sizes from 1 to {length}")
    most = max(fitting, key=lambda size: size.prompts)
    if most.prompts > requests:
        raise SpecError(
            f"--prefill {most} takes {most.prompts} prompts a step, and {requests} requests are in flight; legal are up to that"
        )
    return tuple(sorted(Bucket("prefill", size.prompts, size.tokens) for size in fitting)), [size for size in sizes if size not in fitting]
