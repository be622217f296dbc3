"""Traffic as users state it: lengths, histograms of lengths, or a trace, read into a workload."""

from __future__ import annotations

import json
import random
from pathlib import Path

from ...graphs.errors import SpecError
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
    """The requests of a trace in Mooncake's format, as `npucompile bench serve --trace` reads it, with arrivals in ms.

    Raises:
        SpecError: naming the line that is no request, or a file without any.
    """
    inputs, outputs, arrivals = list[int](), list[int](), list[float]()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            row = entry["timestamp"], entry["input_length"], entry["output_length"]
        except (ValueError, TypeError, KeyError):
            row = None, None, None
        at, input_len, output_len = row
        legal = isinstance(at, int | float) and at >= 0 and all(type(n) is int and n >= 1 for n in (input_len, output_len))
        if not legal:
            raise SpecError(f"{path}:{number} is no request; legal is a JSON object with timestamp in ms, input_length and output_length")
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
    )


def share(workload: Workload, instances: int) -> Workload:
    """What one of several equal instances gets: every so many-th request."""
    if instances == 1:
        return workload
    inputs, outputs, arrivals = workload.inputs[::instances], workload.outputs[::instances], workload.arrivals[::instances]
    return Workload(inputs, outputs, max(workload.concurrency // instances, 1), arrivals, workload.cached)


def shortened(workload: Workload, waves: int) -> Workload:
    """The first so many waves of it."""
    count = max(workload.concurrency * waves, 1)
    inputs, outputs = workload.inputs[:count], workload.outputs[:count]
    return Workload(inputs, outputs, workload.concurrency, workload.arrivals[:count], workload.cached)


def _check_count(count: int) -> None:
    if not 1 <= count <= MOST_REQUESTS:
        raise SpecError(f"{count} requests; legal are 1 to {MOST_REQUESTS}, of which fewer say the same")
