"""runtime/scheduler/policy.py: sizes that cannot serve every request are refused."""

from __future__ import annotations

import pytest
from support.scheduling import policy, request

from npucompile.graphs.errors import SpecError
from npucompile.graphs.types import Bucket, Limits
from npucompile.runtime.scheduler.policy import Policy
from npucompile.runtime.scheduler.request_state import RequestState


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"pages": 4}, "4 pages leave 3 .* takes 4, so legal is at least 5"),
        ({"requests": 0, "drafts": 2}, "1 state slots leave 0 .* takes 3, so legal is at least 4"),
        ({"burst": 0}, "prefill_burst is 0; legal is at least 1"),
        ({"decode": (), "prefill": ()}, "there is no bucket"),
    ],
)
def test_sizes_that_cannot_serve_are_refused(sizes, message):
    with pytest.raises(SpecError, match=message):
        policy(**sizes)


def test_a_decode_bucket_of_another_width_is_refused():
    buckets = (Bucket("prefill", 1, 4), Bucket("decode", 2, 3))
    with pytest.raises(SpecError, match="decode-b2-q3 decodes 3 tokens per request; with 0 drafts, legal is up to 1"):
        Policy(Limits(2, 9, 9, 8), buckets)
    with pytest.raises(SpecError, match="1 state slots per request with 2 drafts; decoding needs 3, one for each candidate"):
        Policy(Limits(2, 9, 9, 8, 1, 2), buckets)
    Policy(Limits(2, 9, 10, 8, 3, 2), buckets)


def test_a_request_verifies_as_many_drafts_as_it_wants_and_the_graphs_have():
    rules = policy(drafts=3)
    states = [RequestState(request("a", speculative_tokens=most), 0, 0.0, drafted=3) for most in (None, 0, 2, 9)]
    assert [rules.drafts(state) for state in states] == [3, 0, 2, 3]
    assert [rules.drafts(state._replace(drafted=1)) for state in states] == [1, 0, 1, 1]
    assert not any(rules.drafts(state._replace(drafted=0)) for state in states)
