"""Turns the outputs of a step into what each of its requests got."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..graphs.errors import NpucompileError
from ..graphs.step_inputs import write_width
from .executor import Outputs
from .request import TokenLogprobs
from .scheduler.request_state import Live
from .scheduler.schedule import State, Step, Turn


class Sampled(NamedTuple):
    """What a step gave one request.

    Attributes:
        tokens: those that count; none after a prefill chunk that is not the last.
        drafted: drafts that were verified; all but the last of `tokens` are drafts that were accepted.
        logprobs: of each token, where the request asked.
    """

    tokens: tuple[int, ...] = ()
    drafted: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()


def read(outputs: Outputs, step: Step, state: State, vocab_size: int) -> tuple[Sampled | None, ...]:
    """What each turn of a step gave.

    Args:
        outputs: by name, as the executor returned them.
        state: in which the step is the oldest in flight.
        vocab_size: V.

    Returns:
        For each turn what its request got; None where that has ended meanwhile, whatever the outputs say of it.

    Raises:
        NpucompileError: outputs are missing, or are not what they can be.
    """
    bucket = step.bucket
    tokens = _array(outputs, "tokens", "i", bucket.batch, write_width(bucket)).tolist()
    counts = _array(outputs, "counts", "i", bucket.batch).tolist() if bucket.kind == "decode" else [1] * bucket.batch
    lives = {live.arrival: live for live in state.running}
    found: list[Sampled | None] = []
    for row, turn in enumerate(step.turns):
        live = lives.get(turn.arrival)
        if live is None:
            found.append(None)
        elif not turn.samples:
            found.append(Sampled())
        else:
            drafted = _drafted(turn, live, state) if bucket.kind == "decode" else 0
            if not 1 <= counts[row] <= drafted + 1:
                raise NpucompileError(
                    f"the executor says that {counts[row]} tokens count for {live.id!r}, of which {drafted} drafts were verified; "
                    f"legal is 1 to {drafted + 1}"
                )
            new = tuple(tokens[row][: counts[row]])
            if not all(0 <= token < vocab_size for token in new):
                raise NpucompileError(f"the executor returned token ids {list(new)} for {live.id!r}; legal is 0 to {vocab_size - 1}")
            found.append(Sampled(new, drafted, _logprobs(outputs, step, row, len(new))))
    return tuple(found)


def _drafted(turn: Turn, live: Live, state: State) -> int:
    """Drafts the row can have verified: no row goes beyond the longest context."""
    return min(turn.drafts, state.policy.limits.max_model_len - live.computed - 1)


def _logprobs(outputs: Outputs, step: Step, row: int, count: int) -> tuple[TokenLogprobs, ...]:
    most = step.turns[row].request.logprobs
    if most is None:
        return ()
    rows, width = step.bucket.batch, write_width(step.bucket)
    chosen = _array(outputs, "chosen_logprobs", "f", rows, width)[row, :count].tolist()
    ids = _array(outputs, "top_ids", "i", rows, width, None)[row, :count, :most].tolist()
    values = _array(outputs, "top_logprobs", "f", rows, width, None)[row, :count, :most].tolist()
    return tuple(TokenLogprobs(one, tuple(zip(*top, strict=True))) for one, *top in zip(chosen, ids, values, strict=True))


def _array(outputs: Outputs, name: str, kind: str, *shape: int | None) -> npt.NDArray[Any]:
    """An output of this kind of number and shape; None is any length."""
    if name not in outputs:
        raise NpucompileError(f"the executor returned no {name}; it returned {', '.join(outputs)}")
    array = np.asarray(outputs[name])
    fits = array.ndim == len(shape) and all(want in (None, size) for size, want in zip(array.shape, shape, strict=True))
    if array.dtype.kind != kind or not fits:
        legal = f"{'int' if kind == 'i' else 'float'}32[{', '.join('n' if size is None else str(size) for size in shape)}]"
        raise NpucompileError(f"the executor returned {name} {array.dtype}{list(array.shape)}; legal is {legal}")
    return array
