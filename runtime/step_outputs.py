"""Reads the outputs of a step: the tokens that it sampled for each request, checked against what the step can return."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..graphs.errors import NpucompileError
from ..graphs.steps.inputs import MAX_RANKED, NON_FINITE, UNDECIDED
from ..graphs.steps.table import kind_of
from ..graphs.types import Bucket
from .executor import Outputs
from .request import Logprobs
from .scheduler.request_state import RequestState
from .scheduler.scheduled_step import GroupStep, ScheduledRequest, ScheduledStep
from .scheduler.state import GroupState, SchedulerState

NOT_FINITE = "the model returned logits that are no finite numbers, of which no token can be taken"


class SampledTokens(NamedTuple):
    """The tokens that a step sampled for one request.

    Attributes:
        token_ids: those that count; none after a prefill chunk that is not the last. Of a score step the prompt's that it scored, first.
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
        _read_group(arrays, step.shape, part, group, max_model_len, vocab_size) if part.rows else ()
        for arrays, part, group in zip(outputs, step.groups, state.groups, strict=True)
    )


def read_finite(outputs: Sequence[Outputs], step: ScheduledStep) -> tuple[Sequence[bool], ...]:
    """Of each segment of each dp group of an encode step whether its rows are finite.

    Raises:
        NpucompileError: the output is missing, or has a shape or dtype that no correct step returns.
    """
    return tuple(
        (_array(arrays, "finite", step.shape)[: len(part.segments)] != 0).tolist() if part.segments else ()
        for arrays, part in zip(outputs, step.groups, strict=True)
    )


def count_experts(outputs: Sequence[Outputs], step: ScheduledStep, group: int) -> npt.NDArray[np.int64] | None:
    """How often tokens of a step chose each expert of each layer, by those of one dp group: [L, E] up to the last one that was chosen; None
    where that has no rows, or steps do not tell. A group counts for all, and of n tokens the one that tells for n: to count 512 rows of
    four tokens and 60 layers would take as long as all else that the host does for a step.

    Raises:
        NpucompileError: the output has a shape, dtype or value that no correct step returns.
    """
    rows = step.groups[group].rows
    if not rows or "experts" not in outputs[group]:
        return None
    told = _array(outputs[group], "experts", step.shape)
    every = step.shape.q_len // told.shape[1]
    tokens = np.concatenate([told[place, : -(-row.num_tokens // every)] for place, row in enumerate(rows)])
    if tokens.min() < 0:
        raise NpucompileError(f"the executor returned expert {tokens.min()}; legal is 0 or more")
    layers, count = tokens.shape[1], int(tokens.max()) + 1
    in_one_row = tokens + count * np.arange(layers)[:, None]
    counted = np.bincount(in_one_row.reshape(-1), minlength=layers * count)
    counts: npt.NDArray[np.int64] = counted.reshape(layers, count) * (every * len(outputs))
    return counts


def _read_group(
    outputs: Outputs, bucket: Bucket, part: GroupStep, group: GroupState, max_model_len: int, vocab_size: int
) -> Sequence[SampledTokens | None]:
    sampled = _array(outputs, "tokens", bucket)[: len(part.rows)]
    kind = kind_of(bucket)
    ends = _array(outputs, "counts", bucket).tolist() if kind.decodes else [1] * bucket.batch
    all_legal = bool(sampled.min() >= 0 and sampled.max() < vocab_size)
    running = {request.arrival: request for request in group.running}
    results: list[SampledTokens | None] = []
    for i, (row, own, end) in enumerate(zip(part.rows, sampled.tolist(), ends, strict=False)):
        state = row.state
        request = running.get(state.arrival)
        if request is None:
            results.append(None)
        elif not (state.decoding or row.samples or row.scores):
            results.append(SampledTokens())
        else:
            # No token lies beyond the longest context.
            num_drafts = min(row.num_tokens - 1, max_model_len - request.num_computed_tokens - 1) if state.decoding else 0
            if not 1 <= end <= num_drafts + 1:
                raise NpucompileError(
                    f"the executor returned a count of {end} tokens for {request.id!r}, of which {num_drafts} drafts were "
                    f"verified; legal is 1 to {num_drafts + 1}"
                )
            begin = 0
            if kind.wide:
                # What follows each token of the chunk; of a row that scores none the last.
                begin, end = 0 if row.scores else row.num_tokens - 1, row.num_tokens
            token_ids, failure = tuple(own[begin:end]), ""
            if not all_legal and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
                failures = {UNDECIDED: _why_undecided(request), NON_FINITE: NOT_FINITE}
                place = next((place for place, token in enumerate(token_ids) if token in failures), None)
                if place is not None:
                    failure, token_ids = failures[token_ids[place]], token_ids[:place]
                if not all(0 <= token < vocab_size for token in token_ids):
                    legal = f"legal is 0 to {vocab_size - 1}"
                    raise NpucompileError(f"the executor returned token ids {list(token_ids)} for {request.id!r}; {legal}")
            plain = state.request.plain
            if not plain and row.first_index < 0:
                _check_forced(row, token_ids)
            most = state.request.logprobs if plain else row.logprobs
            logprobs = () if most is None else _logprobs(outputs, bucket, most, i, slice(begin, begin + len(token_ids)))
            # A mask hides what is no number from the sampled token, and not from its log probability.
            unknown = next((place for place, entry in enumerate(logprobs) if not math.isfinite(entry.logprob)), None) if logprobs else None
            if unknown is not None:
                token_ids, logprobs, failure = token_ids[:unknown], logprobs[:unknown], NOT_FINITE
            drafts = _drafts(outputs, bucket, i) if not plain and state.follows_output else ()
            results.append(tuple.__new__(SampledTokens, (token_ids, num_drafts, logprobs, failure, drafts, failure == NOT_FINITE)))
    return tuple(results)


def _check_forced(row: ScheduledRequest, token_ids: tuple[int, ...]) -> None:
    """Refuses tokens other than the prompt's in places where these are scored."""
    forced = row.request.prompt[row.first_index :][: len(token_ids)]
    if token_ids[: len(forced)] != forced:
        sampled = list(token_ids[: len(forced)])
        raise NpucompileError(f"the executor returned token ids {sampled} for {row.request.id!r}; legal is the prompt's {list(forced)}")


def _why_undecided(request: RequestState) -> str:
    return (
        f"top_p {request.request.sampling.top_p} keeps more tokens here than the {MAX_RANKED} that these graphs rank, which takes a flat "
        f"distribution; legal with any is a top_k from 1 to {MAX_RANKED} beside it"
    )


def _drafts(outputs: Outputs, bucket: Bucket, i: int) -> tuple[int, ...]:
    """The drafts of a row; none of graphs that do not draft."""
    return tuple(_array(outputs, "drafts", bucket)[i].tolist()) if "drafts" in outputs else ()


def _logprobs(outputs: Outputs, bucket: Bucket, most: int, i: int, places: slice) -> tuple[Logprobs, ...]:
    chosen = _array(outputs, "chosen_logprobs", bucket)[i, places].tolist()
    ids, values = (_array(outputs, name, bucket)[i, places, :most].tolist() for name in ("top_ids", "top_logprobs"))
    return tuple(Logprobs(value, tuple(zip(*top, strict=True))) for value, *top in zip(chosen, ids, values, strict=True))


def _array(outputs: Outputs, name: str, bucket: Bucket) -> npt.NDArray[Any]:
    """An output, of the dtype and shape that the record of the bucket's kind says."""
    if name not in outputs:
        raise NpucompileError(f"the executor returned no {name}; it returned {', '.join(outputs)}")
    array, kind = np.asarray(outputs[name]), kind_of(bucket)
    output = next(output for output in kind.outputs if output.name == name)
    sizes = {"B": bucket.batch, "Q": bucket.q_len, "W": kind.sampled(bucket)}
    shape = [sizes.get(letter) for letter in output.dims]
    fits = array.ndim == len(shape) and all(legal in (None, size) for size, legal in zip(array.shape, shape, strict=True))
    if array.dtype.kind != output.kind or not fits:
        legal = f"{'int' if output.kind == 'i' else 'float'}32[{', '.join('n' if size is None else str(size) for size in shape)}]"
        raise NpucompileError(f"the executor returned {name} {array.dtype}{list(array.shape)}; legal is {legal}")
    return array
