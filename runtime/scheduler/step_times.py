"""How long steps take, by bucket: medians of the last that were measured, and what follows from them for those that were not.

Prefill steps of any size are hardly ever the same: of these the last times say how long a step takes for its price.

The engine measures, and a policy that goes by these times has them as an input (`advance.commit`): the same times give the same steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from ...graphs.steps.decode import DECODE
from ...graphs.steps.kind import StepKind
from ...graphs.steps.table import kind_of
from ...graphs.types import Bucket
from ..steps.sizes import Cost

SAMPLES = 8
"""Times of a bucket that are kept. A median of them forgets a step that was held up."""

ENOUGH = 3
"""Times of a bucket before they count."""

FRESH_STEPS = 1000
"""After so many steps without one of it, a prefill bucket is as if it had not been measured: one that once was slow is tried again."""

SWEEP_STEPS = 50
"""How often that is looked at."""


class StepTimes(NamedTuple):
    """Measured times of steps.

    Attributes:
        samples: the last times of each bucket in ms, oldest first.
        last: number of the last step of each bucket.
        ms: of each bucket that was measured often enough.
        steps: that were measured.
        any_size: of each kind the last steps whose sizes are values, and their times.
    """

    samples: Mapping[Bucket, tuple[float, ...]] = {}
    last: Mapping[Bucket, int] = {}
    ms: Mapping[Bucket, float] = {}
    steps: int = 0
    any_size: Mapping[str, tuple[tuple[Bucket, float], ...]] = {}

    def after(self, bucket: Bucket, ms: float) -> StepTimes:
        """The times after one more step."""
        steps = self.steps + 1
        samples, last, known = {**self.samples}, {**self.last, bucket: steps}, {**self.ms}
        samples[bucket] = (*samples.get(bucket, ()), ms)[-SAMPLES:]
        if len(samples[bucket]) >= ENOUGH:
            known[bucket] = median(samples[bucket])
        if steps % SWEEP_STEPS == 0:
            for old in [b for b, step in last.items() if step <= steps - FRESH_STEPS and not kind_of(b).decodes]:
                del last[old], samples[old]
                known.pop(old, None)
        return StepTimes(samples, last, known, steps, self.any_size)

    def after_any_size(self, sizes: Bucket, ms: float) -> StepTimes:
        """The times after one more prefill step, whose sizes are values."""
        recent = (*self.any_size.get(sizes.kind, ()), (sizes, ms))[-SAMPLES:]
        return self._replace(steps=self.steps + 1, any_size={**self.any_size, sizes.kind: recent})

    def rate(self, kind: StepKind, price: Cost) -> float | None:
        """ms that steps of a kind take for a unit of their price: all of its buckets together, or of steps whose sizes are values the
        median of the last; None where too few were measured."""
        if recent := self.any_size.get(kind.name):
            return median(ms / price(sizes) for sizes, ms in recent) if len(recent) >= ENOUGH else None
        known = [(ms, price(bucket)) for bucket, ms in self.ms.items() if bucket.kind == kind.name]
        return sum(ms for ms, _ in known) / sum(units for _, units in known) if known else None

    def cost(self, kind: StepKind, price: Cost) -> Cost | None:
        """What steps of a kind take in ms: as long as they were measured, or by their price where they were not; None where none was."""
        rate = self.rate(kind, price)
        return None if rate is None else lambda bucket: self.ms[bucket] if bucket in self.ms else rate * price(bucket)

    def decode_ms(self, bucket: Bucket) -> float:
        """What a decode step of this bucket, or a smaller one, takes at most; where it was not measured as long as the next larger one,
        else as the largest, or where none of its width was as the longest of any; 0 where none was."""
        decode = DECODE.among(self.ms)
        known = [b for b in decode if b.q_len == bucket.q_len]
        if not known:
            return max((self.ms[b] for b in decode), default=0.0)
        count = sum(b < bucket for b in known) + 1
        return max(self.ms[b] for b in known[:count])


UNMEASURED = StepTimes()


def in_time(buckets: Iterable[Bucket], cost: Cost | None, price: Cost, left_ms: float, first: bool) -> Sequence[Bucket]:
    """The buckets of a kind whose steps take at most so long. Where none does, or none was measured, the cheapest, if the step is the first
    one since somebody decoded, so that prompts go on whatever the target; else none.

    Args:
        buckets: at least one.
        cost: in ms; None where nothing is measured.
        price: in whatever unit, for that case.
    """
    buckets = tuple(buckets)
    if cost is not None and (affordable := [bucket for bucket in buckets if cost(bucket) <= left_ms]):
        return affordable
    return (min(buckets, key=cost or price),) if first else ()
