"""Traffic as users state it: lengths, histograms of lengths, or a trace, read into a workload."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

from ....graphs.errors import SpecError
from ....server.requests.bounds import MAX_PRIORITY
from .system import Workload

WAVES = 4
"""Requests for each one in flight where nobody says how many: the first wave, whose prompts all come at once, is then a quarter."""
MOST_REQUESTS = 20_000


def lengths(text: str, option: str, count: int) -> tuple[int, ...]:
    """So many lengths: of a number, or of a histogram as in `1000:3,4000:1`, in a fixed random order.

    Raises:
        SpecError: naming the option, what was given and what is legal.
    """
    legal = f"{option} {text!r}: legal is a number of tokens, or LENGTH:WEIGHT,... as in 1000:3,4000:1"
    pairs = [part.partition(":") for part in text.split(",")]
    try:
        sizes = [int(size) for size, _, _ in pairs]
        weights = [float(weight) if colon else 1.0 for _, colon, weight in pairs]
    except ValueError:
        raise SpecError(legal) from None
    if min(sizes) < 1 or min(weights) <= 0 or len(set(sizes)) != len(sizes):
        raise SpecError(legal + "; lengths are at least 1 and differ, weights are positive")
    total, drawn, seen = sum(weights), list[int](), 0.0
    for size, weight in zip(sizes, weights, strict=True):
        seen += weight
        drawn += [size] * (round(count * seen / total) - len(drawn))
    random.Random(f"{option}/{text}").shuffle(drawn)
    return tuple(drawn)


def of_lengths(inputs: str, outputs: str, concurrency: int, requests: int | None, rate: float | None, cached: int) -> Workload:
    """A workload of lengths, with requests in flight and perhaps a rate.

    Raises:
        SpecError: as `lengths`; a shared prefix as long as a prompt; more requests than `MOST_REQUESTS`.
    """
    count = WAVES * concurrency if requests is None else requests
    _check_count(count)
    chosen = lengths(inputs, "--input", count)
    if cached >= min(chosen):
        raise SpecError(f"--shared-prefix {cached}: the shortest prompt has {min(chosen)} tokens; legal is less than that")
    arrivals = tuple(i / rate for i in range(count)) if rate else ()
    return Workload(chosen, lengths(outputs, "--output", count), concurrency, arrivals, cached)


def of_trace(path: Path, concurrency: int | None) -> Workload:
    """The requests of a trace in Mooncake's format, with arrivals in ms, and perhaps the `priority` of each, 0 where it has none.

    Raises:
        SpecError: naming the line that is no request, or a file without any.
    """
    inputs, outputs, arrivals, priorities = list[int](), list[int](), list[float](), list[int]()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            row = entry["timestamp"], entry["input_length"], entry["output_length"], entry.get("priority")
        except (ValueError, TypeError, KeyError):
            row = None, None, None, None
        at, input_len, output_len, priority = row
        legal = isinstance(at, int | float) and at >= 0 and all(type(n) is int and n >= 1 for n in (input_len, output_len))
        if not legal:
            raise SpecError(f"{path}:{number} is no request; legal is a JSON object with timestamp in ms, input_length and output_length")
        if priority is not None and (type(priority) is not int or abs(priority) > MAX_PRIORITY):
            known = f"legal is an integer from -{MAX_PRIORITY} to {MAX_PRIORITY}, of which lower ones are served first, or none"
            raise SpecError(f"{path}:{number} has priority {priority!r}; {known}")
        priorities.append(priority or 0)
        inputs.append(input_len)
        outputs.append(output_len)
        arrivals.append(at / 1e3)
    if not inputs:
        raise SpecError(f"{path} has no requests; legal is one JSON object a line")
    _check_count(len(inputs))
    order = sorted(range(len(inputs)), key=arrivals.__getitem__)
    first = arrivals[order[0]]
    return Workload(
        tuple(inputs[i] for i in order),
        tuple(outputs[i] for i in order),
        concurrency or len(inputs),
        tuple(arrivals[i] - first for i in order),
        priorities=tuple(priorities[i] for i in order) if any(priorities) else (),
    )


def share(workload: Workload, instances: int) -> Workload:
    """What one of several equal instances gets: every so many-th request."""
    if instances == 1:
        return workload
    return replace(_part(workload, slice(None, None, instances)), concurrency=max(workload.concurrency // instances, 1))


def shortened(workload: Workload, waves: int) -> Workload:
    """The first so many waves of it."""
    return _part(workload, slice(max(workload.concurrency * waves, 1)))


def _part(workload: Workload, part: slice) -> Workload:
    """Some of its requests."""
    inputs, outputs, arrivals = workload.inputs[part], workload.outputs[part], workload.arrivals[part]
    return replace(workload, inputs=inputs, outputs=outputs, arrivals=arrivals, priorities=workload.priorities[part])


def _check_count(count: int) -> None:
    if not 1 <= count <= MOST_REQUESTS:
        raise SpecError(f"{count} requests; legal are 1 to {MOST_REQUESTS}, of which fewer say the same")
