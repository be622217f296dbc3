"""Decode batch sizes, prefill chunks and limits of a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ...graphs.errors import SpecError
from ...graphs.types import Bucket, Limits
from ...models import registry
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
        slots, pages = 1 + requests * row.slots_per_request, max(row.num_pages, 1 + requests)
        return batches, replace(row, num_pages=pages, num_slots=slots, max_model_len=min(row.max_model_len, longest)), True
    default = row.max_model_len if row else instance.target.max_model_len
    length = min(default, longest) if options.max_model_len is None else options.max_model_len
    if not page <= length <= longest or length % page:
        raise SpecError(
            f"max_model_len is {length}; legal for {source.name} on {instance.target.name} is a multiple of {page} up to {longest}"
        )
    slots = 1 if instance.phase == "prefill" else instance.drafts + 1
    return batches, Limits(page, 1 + sequences * (length // page), 1 + sequences * slots, length, slots, instance.drafts), False


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


def prefill_sizes(options: Options, instance: Instance, length: int) -> tuple[tuple[Bucket, ...], list[int]]:
    """Prefill buckets, and the requested chunk sizes that exceed the context.

    Raises:
        SpecError: no chunk fits the context.
    """
    default = instance.target.prefill if instance.prefill is None else instance.prefill
    if options.prefill is None and not default:
        return (), []
    chunks = tuple(min(chunk, length) for chunk in default) if options.prefill is None else options.prefill
    buckets = tuple(Bucket("prefill", 1, chunk) for chunk in sorted(set(chunks)) if chunk <= length)
    if not buckets:
        raise SpecError(f"no prefill chunk of {chunks} fits max_model_len {length}; legal are sizes from 1 to {length}")
    return buckets, sorted({chunk for chunk in chunks if chunk > length})
