"""Repeats a recorded run on an engine, and finds the first step in which it differs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import numpy as np

from ..graphs.errors import RequestError, SpecError
from .constraint import Bitmask
from .engine import Engine
from .journal import (
    CANCEL,
    DEAD_END,
    END,
    EXPIRED,
    FAILURE,
    FLUSH,
    HELD,
    LANDED,
    LAUNCH,
    MASKS,
    PICTURE,
    RESULT,
    STEP,
    SUBMIT,
    TOOK,
    Entry,
    Journal,
    as_picture,
    as_request,
)
from .mask_filling import MaskFilling
from .scheduler.state import SchedulerState

COMPARED = (EXPIRED, DEAD_END, LAUNCH, RESULT, FAILURE)
"""Entries that are compared; the others are inputs. A cancel may come after its request's end, and is then no input at all."""


@dataclass(frozen=True)
class Divergence:
    """Where a run differs from its record.

    Attributes:
        step: number of the call of `Engine.step`, from 1, among those that did anything.
        recorded: the first entry that differs, or None where the record has no more.
        repeated: what came in its place, or None where nothing did.
    """

    step: int
    recorded: Entry | None
    repeated: Entry | None


@dataclass(frozen=True)
class Replay:
    """What came of a repetition.

    Attributes:
        steps: calls of `Engine.step` that were repeated.
        tokens: that came out the same.
        divergence: None where nothing differed.
        cut: whether the record ends where its process was ended, perhaps within a step.
    """

    steps: int
    requests: int
    tokens: int
    divergence: Divergence | None = None
    cut: bool = False


def replay(engine: Engine, entries: Iterable[Entry], on_step: Callable[[int], None] = lambda _: None) -> Replay:
    """Repeats a run up to its end or the first difference.

    Args:
        engine: without a thread and without requests, that runs ahead as far as the recorded one.
        entries: of the record.
        on_step: called with the number of each step that was repeated.
    """
    repeated: list[Entry] = []
    engine.stepper.journal = Journal(repeated.append)
    now_ms = 0.0
    engine.stepper.now_ms = lambda: now_ms
    took: deque[float] = deque()
    # Where there is none, a step finished that did not in the recorded run.
    engine.stepper.took_ms = lambda *_: took.popleft() if took else 0.0
    steps = tokens = 0
    # A request's arrival is its place here.
    ids: list[str] = []
    engine.stepper.masks = recorded_filling = _RecordedFilling(engine.executor.limits.bitmask_words)
    masks: dict[str, bytes | None] = {}
    patches: dict[tuple[bytes, bytes], Any] = {}
    cut = True
    for recorded, last in _steps(entries):
        if recorded[-1] == [END]:
            cut = False
            recorded.pop()
            if not recorded:
                break
        repeated.clear()
        masks.clear()
        recorded_filling.unready = frozenset(arrival for word, *values in recorded if word == HELD for arrival in values[0])
        took = deque(values[0] for word, *values in recorded if word == TOOK)
        for word, *values in recorded:
            if word == PICTURE:
                key, shape, data = values
                patches[tuple(key)] = as_picture(shape, data)
            elif word == SUBMIT:
                ids.append(values[0]["id"])
                now_ms = max([now_ms, *values[1:]])
                try:
                    engine.submit(as_request(values[0], _Recorded(ids[-1], masks), patches), lambda _: None)
                except (RequestError, SpecError) as error:
                    return Replay(steps, len(ids), tokens, Divergence(steps + 1, [SUBMIT, *values], ["refused", str(error)]))
            elif word == MASKS:
                masks.update(values[0])
            elif word == EXPIRED:
                now_ms = values[0]
            elif word == DEAD_END:
                masks[values[0]] = None
            elif word == LANDED:
                engine.landed(ids[values[0]], filled=all(values[1:]))
            elif word == FLUSH:
                engine.flush_prefix_cache()
            elif word == CANCEL:
                engine.cancel(ids[values[0]])
        engine.step()
        divergence = _difference(steps + 1, recorded, repeated, cut=cut and last)
        if divergence:
            return Replay(steps, len(ids), tokens, divergence)
        steps += 1
        tokens += sum(len(row or ()) for word, *values in recorded if word == RESULT for rows in values[1] for row in rows)
        on_step(steps)
    return Replay(steps, len(ids), tokens, cut=cut)


class _RecordedFilling(MaskFilling):
    """Holds the requests that were held, and has every bitmask at once."""

    unready: frozenset[int] = frozenset()

    def hold(self, state: SchedulerState) -> SchedulerState:
        return state if self.unready == state.unready else replace(state, unready=self.unready)

    def wait(self) -> None:
        pass


class _Recorded:
    """A constraint that was: its bitmasks in the step that is being repeated.

    Args:
        masks: of that step, by request id; None where the request could not go on.
    """

    def __init__(self, request_id: str, masks: Mapping[str, bytes | None]) -> None:
        self._request_id, self._masks = request_id, masks

    def fill(self, output: Sequence[int], drafts: Sequence[int], bitmask: Bitmask) -> None:
        mask = self._masks.get(self._request_id, b"")
        if mask is None:
            raise ValueError("it could not in the recorded run")
        # What the record has no mask of it did not launch; the comparison sees it if this run does.
        if mask:
            # The record has places of the prompt, too, if the step scored any.
            bitmask[:] = np.frombuffer(mask, bitmask.dtype).reshape(-1, bitmask.shape[1])[-len(bitmask) :]


def _steps(entries: Iterable[Entry]) -> Iterator[tuple[list[Entry], bool]]:
    """The entries of each step, without the word that begins it, and whether it is the last."""
    step: list[Entry] = []
    for entry in entries:
        if entry[0] != STEP:
            step.append(entry)
        elif step:
            yield step, False
            step = []
    if step:
        yield step, True


def _difference(number: int, recorded: list[Entry], repeated: list[Entry], *, cut: bool) -> Divergence | None:
    """Where the entries of a step differ first; a record that is cut has no more where its process was ended."""
    expected, found = ([entry for entry in entries if entry[0] in COMPARED] for entries in (recorded, repeated))
    for before, now in zip_longest(expected, found[: len(expected)] if cut else found):
        if before is None or now is None or _compared(before) != _compared(now):
            return Divergence(number, before, now)
    return None


def _compared(entry: Entry) -> Entry:
    # An error's message may name what is different in each process.
    return entry[:2] if entry[0] == FAILURE else entry
