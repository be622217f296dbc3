"""tools/prove/bringup/steps.py: planned steps fit the limits, share nothing between requests, and leave a row of padding."""

from __future__ import annotations

import itertools

import pytest
import torch

from npucompile.graphs.types import Bucket, Limits
from npucompile.tools.prove.bringup.buckets import alternation, one_after_another
from npucompile.tools.prove.bringup.steps import StepPlanner

LIMITS = Limits(page_size=16, num_pages=17, num_slots=17, max_model_len=64, slots_per_request=4, drafts=3)
BUCKETS = (Bucket("prefill", 1, 8), Bucket("decode", 2, 4), Bucket("decode", 4, 4))


@pytest.fixture
def planner():
    return StepPlanner(LIMITS, vocab=100, groups=2)


def test_requests_own_different_pages_and_slots_and_never_the_null_ones(planner):
    requests = planner.requests
    assert len(requests) == 4
    for owned in ([p for r in requests for p in r.pages], [s for r in requests for s in r.slots], [r.request_slot for r in requests]):
        assert len(set(owned)) == len(owned)
        assert 0 not in owned
    assert len(planner.rows_of(BUCKETS[2])) == 3


def test_groups_have_prompts_of_their_own(planner):
    step = planner.prefill(BUCKETS[0], planner.requests[:1], 0, 5)
    assert step.inputs[0]["tokens"].tolist() != step.inputs[1]["tokens"].tolist()
    assert [inputs["query_lens"].tolist() for inputs in step.inputs] == [[5], [5]]
    assert {name: value.shape for name, value in step.tensors[1].items()} == {name: value.shape for name, value in step.inputs[1].items()}


def test_prefills_go_on_until_the_context_is_full_and_begin_again(planner):
    starts = [int(step.inputs[0]["num_computed_tokens"][0]) for step in planner.of_one_bucket(BUCKETS[0], 20)]
    assert starts[0] == 0
    assert starts[1:].count(0) >= 1
    assert max(starts) < LIMITS.max_model_len


def test_pools_start_behind_a_prompt(planner):
    from npucompile.graphs.types import Aval, Leaf

    leaves = [Leaf("state.k", Aval((17, 16, 1, 4), torch.float32, ("pages", None, None, None)))]
    leaves.append(Leaf("state.requests", Aval((LIMITS.num_request_slots, 6), torch.int32, ("request_slots", None))))
    pages, slots = planner.initial_state(leaves)
    assert bool(pages.isfinite().all())
    assert slots[0].tolist() == [0] * 6
    assert slots[1:, 0].tolist() == [planner.first_decode] * 4
    assert sorted(slots[1:, 1].tolist()) == [0, 1, 2, 3]


def test_every_bucket_runs_and_decoding_ones_after_prefills_of_their_requests(planner):
    planned = [(bucket.name, [step.bucket.kind for step in steps], own) for bucket, steps, own in one_after_another(planner, BUCKETS, 2)]
    assert planned == [
        ("prefill-b1-q8", ["prefill"] * 2, True),
        ("decode-b2-q4", ["prefill"], False),
        ("decode-b2-q4", ["decode"] * 2, True),
        ("decode-b4-q4", ["prefill"] * 3, False),
        ("decode-b4-q4", ["decode"] * 2, True),
    ]


def test_alternation_never_outgrows_the_context_nor_knows_more_than_the_device(planner):
    longest: dict[int, int] = {}
    names = []
    for step in alternation(planner, BUCKETS, rounds=30):
        names.append(step.bucket.name)
        for row, request in enumerate(step.rows):
            inputs = step.inputs[0]
            if step.bucket.kind == "prefill":
                longest[request.request_slot] = int(inputs["num_computed_tokens"][row] + inputs["query_lens"][row])
                continue
            # The base must not be beyond the shortest possible position: a token a step.
            assert int(inputs["base"][row]) <= longest[request.request_slot]
            longest[request.request_slot] += 1
            assert int(inputs["base"][row]) + 2 * step.bucket.q_len - 1 <= LIMITS.max_model_len
    assert {pair for pair in itertools.pairwise(names) if pair[0] != pair[1]} >= {("decode-b2-q4", "decode-b4-q4")}
