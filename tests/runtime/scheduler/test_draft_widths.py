"""runtime/scheduler/draft_widths.py: the width of decode steps follows what is accepted and what steps take, and costs little to find."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from support.scheduling import all_decode, policy, request

from npucompile.graphs.types import Bucket
from npucompile.runtime.scheduler.advance import commit, launch
from npucompile.runtime.scheduler.draft_widths import MOST, NOTHING, RETRY_STEPS
from npucompile.runtime.scheduler.schedule import schedule
from npucompile.runtime.scheduler.step_times import SAMPLES
from npucompile.runtime.step_outputs import SampledTokens

WIDTHS = (1, 2, 4)
MS = {1: 10.0, 2: 13.0, 4: 20.0}


def rules(measured=True, batches=(1, 4)):
    plain = policy(batches, (4,), pages=2**14 + 1, page_size=16, length=2**18, requests=4, drafts=3)
    prefill = [bucket for bucket in plain.buckets if bucket.kind == "prefill"]
    decode = [Bucket("decode", batch, width) for batch in batches for width in WIDTHS]
    return replace(plain, buckets=(*prefill, *decode), measured=measured)


class Run:
    """Requests that decode, whose i-th draft is accepted with a probability of its own, in steps that take a time of their own."""

    def __init__(self, rates, rows=1, ms=MS, measured=True, **wanted):
        self.rates, self.ms, self.draw = rates, dict(ms), random.Random(7)
        self.widths, self.tokens, self.took_ms, self.drafted = [], 0, 0.0, {}
        self.state = all_decode(rules(measured), *(request(f"r{i}", 3, 10**6, **wanted) for i in range(rows)))

    def step(self):
        step = schedule(self.state)
        width = step.bucket.q_len
        assert step.bucket.kind == "decode"
        results = []
        for row in step.groups[0].rows:
            assert row.num_drafts <= min(width - 1, self.drafted.get(row.request.id, 3))
            self.drafted[row.request.id] = width - 1
            accepted = next((i for i in range(row.num_drafts) if self.draw.random() >= self.rates[i]), row.num_drafts)
            results.append(SampledTokens((7,) * (1 + accepted), row.num_drafts))
        took = self.ms[width] if self.state.policy.measured else None
        self.state, _ = commit(launch(self.state, step, 0.0), step, [results], 0.0, took)
        self.widths.append(width)
        self.tokens += sum(len(result.token_ids) for result in results)
        self.took_ms += self.ms[width]

    def steps(self, count):
        for _ in range(count):
            self.step()
        return self

    def rate(self, count):
        """Tokens a ms of so many steps from now on."""
        tokens, took_ms = self.tokens, self.took_ms
        self.steps(count)
        return (self.tokens - tokens) / (self.took_ms - took_ms)


def best_fixed(rates, ms=MS):
    """Tokens a ms of a row with the best number of drafts."""
    expected, likely, best = 1.0, 1.0, 1.0 / ms[1]
    for drafts, rate in enumerate(rates, 1):
        likely *= rate
        expected += likely
        if drafts + 1 in ms:
            best = max(best, expected / ms[drafts + 1])
    return best


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("rates", [(0, 0, 0), (0.6, 0.5, 0.4), (0.85, 0.7, 0.6), (0.95, 0.9, 0.9), (1, 1, 1)], ids=str)
def test_it_is_within_a_twentieth_of_the_best_number_of_drafts(rates, rows):
    run = Run(rates, rows).steps(100)
    assert run.rate(4000) > 0.95 * rows * best_fixed(rates)


def mostly(widths):
    """The width of at least nine steps of ten."""
    ((width, count),) = Counter(widths).most_common(1)
    return width if count >= 0.9 * len(widths) else None


def test_refused_drafts_come_to_steps_without_and_accepted_ones_to_the_widest():
    refused, accepted = (Run((rate,) * 3).steps(300) for rate in (0.0, 1.0))
    assert (mostly(refused.widths[100:]), mostly(accepted.widths[20:])) == (1, 4)
    # Without measured times it goes by prices.
    for rate, width in ((0.0, (1, 2)), (1.0, (4,))):
        assert mostly(Run((rate,) * 3, measured=False).steps(300).widths[100:]) in width


def test_what_changes_is_found_out():
    """Drafts that become good, and steps that become fast or slow, while another width runs."""
    run = Run((0.0, 0.0, 0.0)).steps(3000)
    run.rates = (1.0, 1.0, 1.0)
    run.steps(3000)
    assert mostly(run.widths[-500:]) == 4
    run.ms[4] = 90.0
    run.steps(3000)
    assert mostly(run.widths[-500:]) == 2
    run.ms[2] = 90.0
    run.steps(3000)
    assert mostly(run.widths[-500:]) == 1
    run.ms.update(MS)
    run.steps(12 * RETRY_STEPS)
    assert mostly(run.widths[-500:]) == 4


def test_requests_that_want_no_drafts_get_steps_without():
    assert set(Run((1.0,) * 3, speculative_tokens=0).steps(60).widths) == {1}
    assert mostly(Run((1.0,) * 3, speculative_tokens=1).steps(60).widths[5:]) == 2


def test_every_width_is_measured_in_the_beginning_widest_first():
    run = Run((0.5, 0.5, 0.5)).steps(250)
    assert run.widths[:3] == [4, 2, 1]
    # Now and then again, until each has as many times as are kept.
    assert all(run.widths.count(width) >= SAMPLES for width in MS)


def test_slow_first_steps_of_an_executable_do_not_keep_its_width_from_being_used():
    run = Run((1.0, 1.0, 1.0))
    run.ms[4] = 10 * MS[4]
    run.steps(3)
    run.ms[4] = MS[4]
    assert mostly(run.steps(300).widths[150:]) == 4


def test_the_same_times_and_tokens_give_the_same_steps():
    one, other = (Run((0.6, 0.5, 0.4), rows=3).steps(500) for _ in range(2))
    assert one.widths == other.widths
    assert one.state.acceptance == other.state.acceptance


def test_counts_are_of_drafts_behind_accepted_ones_and_fade():
    counts = NOTHING.after([(3, 3), (3, 1), (1, 0), (0, 0)], 3)
    assert (counts.verified, counts.accepted) == ((3.0, 2.0, 1.0), (2.0, 1.0, 1.0))
    assert counts.after([], 3).verified < counts.verified
    for _ in range(400):
        counts = counts.after([(3, 3)] * 8, 3)
    assert counts.verified == pytest.approx((MOST,) * 3)
    assert counts.tokens(3)[-1] > 3.5
