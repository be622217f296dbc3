"""Reads the outputs of a step: the tokens that it sampled for each request, checked against what the step can return."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..graphs.errors import NpucompileError
from ..graphs.step_inputs import MAX_RANKED, NON_FINITE, UNDECIDED, write_width
from ..graphs.types import Bucket
from .executor import Outputs
from .lazy_sequence import LazySequence
from .request import Logprobs
from .scheduler.decode_batch import DecodeBatch, Ints
from .scheduler.request_state import RequestState
from .scheduler.scheduled_step import GroupStep, ScheduledRequest, ScheduledStep
from .scheduler.state import GroupState, SchedulerState

NOT_FINITE = "the model returned logits that are no finite numbers, of which no token can be taken"


class SampledTokens(NamedTuple):
    """The tokens that a step sampled for one request.

    Attributes:
        token_ids: those that count; none after a prefill chunk that is not the last.
        num_drafts: drafts that were verified; all but the last of `token_ids` are accepted drafts.
        logprobs: of each token, if the request asks for them.
        failure: why there is no token after those; "" where there is.
        drafts: what the step drafted after the last of them, where what may follow depends on them.
        not_finite: the failure is that the model returned what is no number.
    """

    token_ids: tuple[int, ...] = ()
    num_drafts: int = 0
    logprobs: tuple[Logprobs, ...] = ()
    failure: str = ""
    drafts: tuple[int, ...] = ()
    not_finite: bool = False


class BatchTokens(LazySequence[SampledTokens]):
    """The tokens that a step sampled for each request of a batch. None of them ends a request, and nothing failed.

    Attributes:
        ids: of the requests, in the order of the rows.
        token_ids: as `SampledTokens.token_ids`, of each row.
        counts: how many these are.
        verified: as `SampledTokens.num_drafts`.
        logprobs: as `SampledTokens.logprobs`; None where no request asks for any.
    """

    __slots__ = ("counts", "ids", "logprobs", "token_ids", "verified")

    def __init__(
        self,
        ids: tuple[str, ...],
        token_ids: Sequence[tuple[int, ...]],
        counts: Ints,
        verified: Ints,
        logprobs: list[tuple[Logprobs, ...]] | None = None,
    ) -> None:
        self.ids, self.token_ids, self.counts, self.verified, self.logprobs = ids, token_ids, counts, verified, logprobs

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def total(self) -> int:
        """Tokens of all rows."""
        return sum(map(len, self.token_ids))

    def _make(self) -> tuple[SampledTokens, ...]:
        logprobs = self.logprobs or [()] * len(self)
        return tuple(map(SampledTokens, self.token_ids, self.verified.tolist(), logprobs))


def read_outputs(
    outputs: Sequence[Outputs], step: ScheduledStep, state: SchedulerState, vocab_size: int
) -> tuple[Sequence[SampledTokens | None], ...]:
    """The sampled tokens of each row of each dp group.

    Args:
        outputs: of each group, as the executor returned them; not read for a group without rows.
        state: in which the step is the oldest in flight.
        vocab_size: V.

    Returns:
        For each row its tokens; None for a request that has ended meanwhile, whatever its outputs are.

    Raises:
        NpucompileError: an output is missing, or has a shape, dtype or value that no correct step returns.
    """
    max_model_len = state.policy.limits.max_model_len
    return tuple(
        _read_group(arrays, step.bucket, part, group, max_model_len, vocab_size) if part.rows else ()
        for arrays, part, group in zip(outputs, step.groups, state.groups, strict=True)
    )


def _read_batch(outputs: Outputs, bucket: Bucket, batch: DecodeBatch, max_model_len: int, vocab_size: int) -> BatchTokens | None:
    """What a step sampled for a whole batch; None where that ends a request or is not right, so that each row has to be looked at."""
    members, computed, rows = batch.members, batch.progress.num_computed, len(batch)
    tokens = _array(outputs, "tokens", "i", bucket.batch, write_width(bucket))[:rows]
    counts, verified = _array(outputs, "counts", "i", bucket.batch)[:rows], members.drafts
    token_ids: Sequence[tuple[int, ...]]
    if bucket.q_len == 1:
        flat = tokens[:, 0].tolist()
        if counts.tolist().count(1) != rows or batch.may_end(1):
            return None
        counts, token_ids = members.ones, list(zip(flat, strict=True))
    else:
        counts, verified = counts.astype(np.int64), np.minimum(members.drafts, max_model_len - 1 - computed)
        if ((counts < 1) | (counts > verified + 1) | (computed + counts + 1 >= members.ends)).any():
            return None
        token_ids = [tuple(row[:count]) for row, count in zip(tokens.tolist(), counts.tolist(), strict=True)]
        flat = list(itertools.chain.from_iterable(token_ids))
    if not batch.grows or min(flat) < 0 or max(flat) >= vocab_size or not members.stops.isdisjoint(flat):
        return None
    if not members.scores:
        return BatchTokens(members.ids, token_ids, counts, verified)
    logprobs = _all_logprobs(outputs, bucket, [state.request.logprobs for state in members.states], token_ids)
    finite = all(math.isfinite(entry.logprob) for entries in logprobs for entry in entries)
    return BatchTokens(members.ids, token_ids, counts, verified, logprobs) if finite else None


def _read_group(
    outputs: Outputs, bucket: Bucket, part: GroupStep, group: GroupState, max_model_len: int, vocab_size: int
) -> Sequence[SampledTokens | None]:
    if isinstance(group.running, DecodeBatch) and bucket.kind == "decode" and part.arrivals == group.running.members.arrivals:
        batch_tokens = _read_batch(outputs, bucket, group.running, max_model_len, vocab_size)
        if batch_tokens is not None:
            return batch_tokens
    tokens = _array(outputs, "tokens", "i", bucket.batch, write_width(bucket)).tolist()
    counts = _array(outputs, "counts", "i", bucket.batch).tolist() if bucket.kind == "decode" else [1] * bucket.batch
    running = {request.arrival: request for request in group.running}
    results: list[SampledTokens | None] = []
    for i, row in enumerate(part.rows):
        request = running.get(row.state.arrival)
        if request is None:
            results.append(None)
        elif not row.samples:
            results.append(SampledTokens())
        else:
            num_drafts = _verified(row, request, max_model_len)
            if not 1 <= counts[i] <= num_drafts + 1:
                raise NpucompileError(
                    f"the executor returned a count of {counts[i]} tokens for {request.id!r}, of which {num_drafts} drafts were "
                    f"verified; legal is 1 to {num_drafts + 1}"
                )
            token_ids = tuple(tokens[i][: counts[i]])
            failure = ""
            if min(token_ids) < 0 or max(token_ids) >= vocab_size:
                failures = {UNDECIDED: _why_undecided(request), NON_FINITE: NOT_FINITE}
                end = next((place for place, token in enumerate(token_ids) if token in failures), None)
                if end is not None:
                    failure, token_ids = failures[token_ids[end]], token_ids[:end]
                if not all(0 <= token < vocab_size for token in token_ids):
                    legal = f"legal is 0 to {vocab_size - 1}"
                    raise NpucompileError(f"the executor returned token ids {list(token_ids)} for {request.id!r}; {legal}")
            if row.forced:
                _check_forced(row, token_ids)
            logprobs = _logprobs(outputs, bucket, row.logprobs, i, len(token_ids))
            # A mask hides what is no number from the sampled token, and not from its log probability.
            unknown = next((place for place, entry in enumerate(logprobs) if not math.isfinite(entry.logprob)), None) if logprobs else None
            if unknown is not None:
                token_ids, logprobs, failure = token_ids[:unknown], logprobs[:unknown], NOT_FINITE
            drafts = _drafts(outputs, bucket, i) if row.state.follows_output else ()
            results.append(SampledTokens(token_ids, num_drafts, logprobs, failure, drafts, failure == NOT_FINITE))
    return tuple(results)


def _check_forced(row: ScheduledRequest, token_ids: tuple[int, ...]) -> None:
    """Refuses tokens other than the prompt's in places where these are scored."""
    forced = row.forced[: len(token_ids)]
    if token_ids[: len(forced)] != forced:
        found = list(token_ids[: len(forced)])
        raise NpucompileError(f"the executor returned token ids {found} for {row.request.id!r}; legal is the prompt's {list(forced)}")


def _why_undecided(request: RequestState) -> str:
    return (
        f"top_p {request.request.sampling.top_p} keeps more tokens here than the {MAX_RANKED} that these graphs rank, which takes a flat "
        f"distribution; legal with any is a top_k from 1 to {MAX_RANKED} beside it"
    )


def _verified(row: ScheduledRequest, request: RequestState, max_model_len: int) -> int:
    """Drafts that the row can have verified: no token lies beyond the longest context."""
    return min(row.num_drafts, max_model_len - request.num_computed_tokens - 1)


def _drafts(outputs: Outputs, bucket: Bucket, i: int) -> tuple[int, ...]:
    """The drafts of a row; none of graphs that do not draft."""
    return tuple(_array(outputs, "drafts", "i", bucket.batch, None)[i].tolist()) if "drafts" in outputs else ()


def _logprobs(outputs: Outputs, bucket: Bucket, most: int | None, i: int, count: int) -> tuple[Logprobs, ...]:
    if most is None:
        return ()
    batch, width = bucket.batch, write_width(bucket)
    chosen = _array(outputs, "chosen_logprobs", "f", batch, width)[i, :count].tolist()
    ids = _array(outputs, "top_ids", "i", batch, width, None)[i, :count, :most].tolist()
    values = _array(outputs, "top_logprobs", "f", batch, width, None)[i, :count, :most].tolist()
    return tuple(Logprobs(value, tuple(zip(*top, strict=True))) for value, *top in zip(chosen, ids, values, strict=True))


def _all_logprobs(
    outputs: Outputs, bucket: Bucket, most: Sequence[int | None], token_ids: Sequence[tuple[int, ...]]
) -> list[tuple[Logprobs, ...]]:
    """`_logprobs` of the first rows, which reads each output once."""
    batch, width, rows = bucket.batch, write_width(bucket), len(most)
    chosen = _array(outputs, "chosen_logprobs", "f", batch, width)[:rows].tolist()
    ids = _array(outputs, "top_ids", "i", batch, width, None)[:rows].tolist()
    values = _array(outputs, "top_logprobs", "f", batch, width, None)[:rows].tolist()
    return [
        ()
        if count is None
        else tuple([Logprobs(c, tuple(zip(i[:count], v[:count], strict=True))) for c, i, v, _ in zip(*row, strict=False)])
        for count, *row in zip(most, chosen, ids, values, token_ids, strict=True)
    ]


def _array(outputs: Outputs, name: str, kind: str, *shape: int | None) -> npt.NDArray[Any]:
    """An output of this numpy dtype kind and shape; a size of None stands for any."""
    if name not in outputs:
        raise NpucompileError(f"the executor returned no {name}; it returned {', '.join(outputs)}")
    array = np.asarray(outputs[name])
    fits = array.shape == shape or (
        array.ndim == len(shape) and all(legal in (None, size) for size, legal in zip(array.shape, shape, strict=True))
    )
    if array.dtype.kind != kind or not fits:
        legal = f"{'int' if kind == 'i' else 'float'}32[{', '.join('n' if size is None else str(size) for size in shape)}]"
        raise NpucompileError(f"the executor returned {name} {array.dtype}{list(array.shape)}; legal is {legal}")
    return array
