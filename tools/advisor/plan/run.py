"""What a simulation returns: times of every request, and how many steps of what size there were."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from .products import Array
from .system import Workload


class PhaseSpan(NamedTuple):
    """A stretch of equal steps: "decode" or "prefill", its largest group, and the requests that run."""

    start_s: float
    end_s: float
    kind: str
    rows: int
    running: int


@dataclass
class Trace:
    """What happens in a simulation.

    Attributes:
        sent, first, end: seconds of each request: sent by the client, first token, last token.
        steps: decode steps by live rows of the largest group.
        decode_s: seconds of them.
        context_s: sum of context times seconds of them.
        stalled_s: request-seconds in prefill steps of requests that could have decoded.
        gaps: seconds between two deliveries, each with how many there were.
        spans: of the timeline.
        prefill_busy_s: seconds of prefill steps, of all prefill instances.
        retracted: requests that lost their cache.
        running_s: request-seconds in decode steps.
        waiting: times that a prompt found too little memory.
    """

    sent: list[float]
    first: list[float]
    end: list[float]
    steps: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    decode_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    context_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    running_s: float = 0.0
    stalled_s: float = 0.0
    gaps: list[tuple[float, int]] = field(default_factory=list)
    spans: list[PhaseSpan] = field(default_factory=list)
    prefill_busy_s: float = 0.0
    retracted: int = 0
    waiting: int = 0

    def decode(self, start_s: float, count: int, seconds: float, rows: int, running: int, context: float) -> None:
        """So many equal decode steps, each of so many seconds."""
        taken = count * seconds
        self.steps[rows] += count
        self.decode_s[rows] += taken
        self.context_s[rows] += taken * context
        self.running_s += taken * running
        self.spans.append(PhaseSpan(start_s, start_s + taken, "decode", rows, running))

    @property
    def makespan_s(self) -> float:
        return max(self.end) - min(self.sent)


class LatencySpread(NamedTuple):
    """Mean and percentiles of a latency."""

    mean: float
    median: float
    p95: float
    p99: float

    @staticmethod
    def of(values: Array) -> LatencySpread:
        """Of equally weighted values."""
        return LatencySpread(float(values.mean()), *(float(x) for x in np.percentile(values, (50, 95, 99))))

    def as_dict(self) -> Mapping[str, float]:
        """Plain values, three decimals."""
        return {name: round(value, 3) for name, value in self._asdict().items()}


def by_priority(values: Array, priorities: Sequence[int]) -> dict[int, LatencySpread]:
    """Of the values of each priority's requests, most urgent first; of none where all are of one."""
    levels = sorted(set(priorities))
    return {level: LatencySpread.of(values[np.asarray(priorities) == level]) for level in levels} if len(levels) > 1 else {}


def weighted(pairs: list[tuple[float, int]]) -> LatencySpread:
    """Of values that each count several times."""
    if not pairs:
        return LatencySpread(0.0, 0.0, 0.0, 0.0)
    values, counts = (np.asarray(column, dtype=float) for column in zip(*pairs, strict=True))
    order = np.argsort(values)
    values, total = values[order], np.cumsum(counts[order])
    marks = (float(values[min(int(np.searchsorted(total, q * total[-1])), len(values) - 1)]) for q in (0.5, 0.95, 0.99))
    return LatencySpread(float((values * counts[order]).sum() / total[-1]), *marks)


@dataclass(frozen=True)
class RunLatencies:
    """What clients of a simulated server see; times in ms.

    Attributes:
        tpot_ms, ttft_ms, e2e_ms: over requests, as (E2E - TTFT) / (output - 1).
        itl_ms: over deliveries: between two steps that delivered tokens of the same request.
        output_tok_s: all output tokens over the whole run, all instances together.
        trace: what happened.
        priority_ttft_ms: ttft_ms of the requests of each priority, where there are several.
    """

    tpot_ms: LatencySpread
    ttft_ms: LatencySpread
    e2e_ms: LatencySpread
    itl_ms: LatencySpread
    output_tok_s: float
    trace: Trace
    priority_ttft_ms: Mapping[int, LatencySpread]

    @staticmethod
    def of(workload: Workload, trace: Trace) -> RunLatencies:
        """The latencies of a run."""
        sent, first, end = (np.asarray(times) * 1e3 for times in (trace.sent, trace.first, trace.end))
        outputs = np.asarray(workload.outputs, dtype=float)
        several = outputs > 1
        tpot = (end - first)[several] / (outputs - 1)[several] if several.any() else np.zeros(1)
        return RunLatencies(
            LatencySpread.of(tpot),
            LatencySpread.of(first - sent),
            LatencySpread.of(end - sent),
            weighted([(gap * 1e3, count) for gap, count in trace.gaps]),
            float(outputs.sum()) / trace.makespan_s,
            trace,
            by_priority(first - sent, workload.priorities),
        )
