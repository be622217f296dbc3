"""The figures of a load: rates, percentiles of latencies, goodput. Pure arithmetic over outcomes."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ....graphs.errors import SpecError
from .outcome import StreamOutcome

PERCENTILES = (95, 99)
OBJECTIVES = ("ttft", "tpot", "e2el")
"""Latencies that `--goodput` can bound."""


@dataclass(frozen=True)
class Latency:
    """Statistics of one latency in ms; all 0 where nothing was measured.

    Attributes:
        count: of measurements.
        std: of the population.
        percentiles: by percentage.
    """

    count: int
    mean: float
    median: float
    std: float
    percentiles: Mapping[int, float]


@dataclass(frozen=True)
class Summary:
    """The figures of a load; of requests that did not fail, unless it says otherwise.

    Attributes:
        errors: number of failed requests by message.
        duration_s: from the start to the end of the last request, failed ones too.
        concurrency: mean number of requests open.
        peak_concurrency: most requests open at once.
        peak_output_throughput: most tokens that arrived in one second, counted in whole seconds from the start.
        goodput: requests per second that meet all objectives; None without objectives.
        accept_length: mean tokens of a step that verified drafts; None where the server did not say.
        cached_tokens: prompt tokens whose prefill was skipped; None where the server did not say.
    """

    completed: int
    failed: int
    errors: Mapping[str, int]
    duration_s: float
    total_input: int
    total_output: int
    request_throughput: float
    output_throughput: float
    total_throughput: float
    concurrency: float
    peak_concurrency: int
    peak_output_throughput: float
    ttft: Latency
    tpot: Latency
    itl: Latency
    e2el: Latency
    goodput: float | None = None
    accept_length: float | None = None
    cached_tokens: int | None = None


def summarise(outcomes: Sequence[StreamOutcome], objectives: Mapping[str, float] | None = None) -> Summary:
    """The figures of all requests of a load.

    Args:
        objectives: bounds in ms, by a name of OBJECTIVES.
    """
    good = [outcome for outcome in outcomes if outcome.error is None]
    duration = max((outcome.ended_s for outcome in outcomes), default=0.0)
    total_input, total_output = sum(o.prompt_tokens for o in good), sum(o.output_tokens for o in good)
    verify_steps = sum(o.told.verify_steps or 0 for o in good)
    cached = [o.told.cached_tokens for o in good if o.told.cached_tokens is not None]
    return Summary(
        completed=len(good),
        failed=len(outcomes) - len(good),
        errors=dict(Counter(o.error for o in outcomes if o.error is not None).most_common()),
        duration_s=duration,
        total_input=total_input,
        total_output=total_output,
        request_throughput=_rate(len(good), duration),
        output_throughput=_rate(total_output, duration),
        total_throughput=_rate(total_input + total_output, duration),
        concurrency=_rate(sum(o.e2e_s for o in good), duration),
        peak_concurrency=peak_concurrency(good),
        peak_output_throughput=peak_output_throughput(good),
        ttft=latency([o.ttft_s for o in good if o.ttft_s is not None]),
        tpot=latency([o.tpot_s for o in good if o.tpot_s is not None]),
        itl=latency([gap for o in good for gap in o.itl_s]),
        e2el=latency([o.e2e_s for o in good]),
        goodput=_rate(sum(meets(o, objectives) for o in good), duration) if objectives else None,
        accept_length=1 + sum(o.told.accepted_tokens or 0 for o in good) / verify_steps if verify_steps else None,
        cached_tokens=sum(cached) if cached else None,
    )


def latency(seconds: Sequence[float]) -> Latency:
    """Statistics in ms of measurements in seconds."""
    if not seconds:
        return Latency(0, 0.0, 0.0, 0.0, dict.fromkeys(PERCENTILES, 0.0))
    ordered = sorted(1e3 * value for value in seconds)
    high = {percent: percentile(ordered, percent) for percent in PERCENTILES}
    return Latency(len(ordered), statistics.fmean(ordered), percentile(ordered, 50), statistics.pstdev(ordered), high)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """A percentile of at least one value in ascending order, interpolated linearly between the nearest two, as numpy's default."""
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def peak_concurrency(outcomes: Sequence[StreamOutcome]) -> int:
    """Most requests open at once; one that ends when another is sent is not open beside it."""
    changes = sorted([(o.sent_s, 1) for o in outcomes] + [(o.ended_s, -1) for o in outcomes])
    live = peak = 0
    for _, change in changes:
        live += change
        peak = max(peak, live)
    return peak


def peak_output_throughput(outcomes: Sequence[StreamOutcome]) -> float:
    """Most tokens that arrived in one whole second since the start."""
    seconds: Counter[int] = Counter()
    for outcome in outcomes:
        for arrival in outcome.arrivals:
            seconds[math.floor(arrival.s)] += arrival.tokens
    return float(max(seconds.values(), default=0))


def meets(outcome: StreamOutcome, objectives: Mapping[str, float]) -> bool:
    """Whether a request that did not fail stays within all bounds (ms); a latency that it does not have stays within any."""
    values = {"ttft": outcome.ttft_s, "tpot": outcome.tpot_s, "e2el": outcome.e2e_s}
    return all((values[name] or 0.0) * 1e3 <= bound for name, bound in objectives.items())


def read_objectives(text: str) -> dict[str, float]:
    """Reads `ttft:200,tpot:50`: bounds in ms.

    Raises:
        SpecError: on anything else.
    """
    legal = f"legal is a list like ttft:200,tpot:50 of {', '.join(OBJECTIVES)} with numbers of ms above 0"
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, bound = part.strip().partition(":")
        try:
            value = float(bound)
        except ValueError:
            value = math.nan
        if name not in OBJECTIVES or name in found or not 0 < value < math.inf:
            raise SpecError(f"--goodput has {part.strip()!r}; {legal}")
        found[name] = value
    return found


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds else 0.0
