"""How many drafts a decode step verifies and drafts again: its width, where an artifact has decode buckets of several.

A step of a width gives as many tokens as its drafts are accepted, and takes as long as it takes: the width is chosen that gives most
tokens in a ms. What is accepted is counted by place, and what counts fades, so that in the end a wider step is tried again: then a few
rows say whether drafts are good now. Steps of a bucket that were never measured, or not for long, are run for that. So both cost little,
as `FADE` and `RETRY_STEPS` say. Everything is a function of the scheduler's state: the same times and tokens give the same widths.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ...graphs.types import Bucket
from .policy import Policy
from .step_times import SAMPLES, StepTimes

PRIOR, LIKELY = 8.0, 0.8
"""Before drafts of a place were verified they are taken to be accepted as if of so many this share had been: an artifact that drafts
begins with its widest steps, and ten drafts that are refused say otherwise."""

MOST = 128.0
"""Drafts of a place that count at most. Of more, a change would be seen late."""

FADE = 0.5 ** (1 / 400)
"""What a decode step leaves of the counts of those before it. Where no draft is accepted, a step of twice the time is then tried in about
one of a hundred and fifty, which takes another step of that width to be verified: 1.3 % of the time, and less in larger batches."""

RETRY_STEPS = 800
"""After so many steps without one of a bucket, one measures it again."""

EARLY_STEPS = 20
"""The same for one that has few times: the first ones of an executable are often slow, and would keep its width from use for long."""

CLEARLY = 1.03
"""How many times as many tokens in a ms another width must give before it is taken: the first step of a wider one has no drafts."""


class Acceptance(NamedTuple):
    """What became of the drafts of all requests.

    Attributes:
        verified: drafts that were verified behind accepted ones, by place among those of a step from 0; as long as the widest has drafts.
        accepted: those of them that were accepted.
        width: of the last decode step that was launched; 0 before the first.
    """

    verified: tuple[float, ...] = ()
    accepted: tuple[float, ...] = ()
    width: int = 0

    def after(self, rows: Iterable[tuple[int, int]], drafts: int) -> Acceptance:
        """The counts after one more decode step.

        Args:
            rows: of each row drafts that were verified, and how many of them, the first ones, were accepted.
            drafts: of the widest step.
        """
        verified = [FADE * count for count in self.verified or (0.0,) * drafts]
        accepted = [FADE * count for count in self.accepted or (0.0,) * drafts]
        for tried, right in rows:
            for place in range(min(tried, right + 1)):
                verified[place] += 1
                accepted[place] += place < right
        shares = [min(1.0, MOST / count) if count else 1.0 for count in verified]
        scaled = [tuple(count * share for count, share in zip(counts, shares, strict=True)) for counts in (verified, accepted)]
        return self._replace(verified=scaled[0], accepted=scaled[1])

    def tokens(self, drafts: int) -> list[float]:
        """Tokens that a row gets of a step which verifies 0, 1, ... up to so many drafts, on average."""
        expected, likely = [1.0], 1.0
        for place in range(drafts):
            verified, accepted = (counts[place] if counts else 0.0 for counts in (self.verified, self.accepted))
            likely *= (LIKELY * PRIOR + accepted) / (PRIOR + verified)
            expected.append(expected[-1] + likely)
        return expected


NOTHING = Acceptance()
"""Before the first step."""


def buckets_of_width(policy: Policy, times: StepTimes, acceptance: Acceptance, live: int, most: Mapping[int, int]) -> Sequence[Bucket]:
    """The decode buckets of the width that the next step should have.

    Args:
        live: rows of the group that has most; at least 1.
        most: how many rows want so many drafts verified at most.
    """
    if not policy.varies:
        return policy.buckets
    # Wider steps than the narrowest that verifies all drafts which are wanted are of no use.
    widest = next((width for width in sorted(policy.buckets_by_width) if width > max(most)), max(policy.buckets_by_width))
    by_width = {width: own for width, own in policy.buckets_by_width.items() if width <= widest}
    fitting = {width: next((b for b in own if b.batch >= live), own[-1]) for width, own in by_width.items()}
    if policy.measured:
        untried = [b for b in fitting.values() if b not in times.samples]
        stale = [b for b in fitting.values() if times.last.get(b, 0) + _patience(times, b) < times.steps]
        if due := untried or stale:
            return policy.buckets_by_width[max(b.q_len for b in due)]
    expected = acceptance.tokens(policy.limits.drafts)

    def rate(bucket: Bucket) -> float:
        tokens = sum(rows * expected[min(drafts, bucket.q_len - 1)] for drafts, rows in most.items()) / sum(most.values())
        # The fastest of the last: first steps of an executable are often slow.
        ms = min(times.samples[bucket]) if policy.measured else policy.price(bucket)
        return tokens * min(live, bucket.batch) / ms

    rates = {width: rate(bucket) for width, bucket in fitting.items()}
    best = max(rates, key=lambda width: (rates[width], width))
    kept = acceptance.width
    return policy.buckets_by_width[kept if kept in rates and rates[best] < CLEARLY * rates[kept] else best]


def _patience(times: StepTimes, bucket: Bucket) -> int:
    return RETRY_STEPS if len(times.samples.get(bucket, ())) >= SAMPLES else EARLY_STEPS
