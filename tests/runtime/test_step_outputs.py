"""runtime/step_outputs.py: outputs become the tokens of each request, and outputs that make no sense are refused."""

from __future__ import annotations

import numpy as np
import pytest
from support import toy_device as toy

from npucompile.graphs.errors import NpucompileError
from npucompile.graphs.steps.inputs import NON_FINITE
from npucompile.graphs.types import Bucket, Limits
from npucompile.runtime.request import Request
from npucompile.runtime.scheduler.policy import Policy
from npucompile.runtime.scheduler.request_state import RequestState
from npucompile.runtime.scheduler.scheduled_step import GroupStep, ScheduledRequest, ScheduledSegment, ScheduledStep
from npucompile.runtime.scheduler.state import GroupState, SchedulerState
from npucompile.runtime.step_outputs import NOT_FINITE, count_experts, read_finite, read_outputs

VOCAB = 13
DECODE, PREFILL, SCORE = Bucket("decode", 3, 3), Bucket("prefill", 2, 4), Bucket("score", 2, 4)
RULES = Policy(Limits(4, 33, 13, 16, 3, 2), (DECODE, PREFILL, SCORE))


def i32(values):
    return np.array(values, np.int32)


def row(arrival, *, drafts=2, logprobs=None, computed=5):
    """A decode row."""
    request = Request(f"r{arrival}", (1, 2), 9, logprobs=logprobs)
    return ScheduledRequest(RequestState(request, arrival, 0.0, num_computed_tokens=computed, decoding=True), 4, 1 + drafts)


def read(outputs, bucket, rows, running=None):
    """The results of one group's rows, whose requests are running unless `running` says which are."""
    state = SchedulerState(RULES, (GroupState(running=tuple(row.state for row in running or rows)),))
    (results,) = read_outputs([outputs], ScheduledStep(bucket, (GroupStep(tuple(rows)),)), state, VOCAB)
    return results


def decoded(tokens=((1, 2, 3), (4, -7, -7), (-7, -7, -7)), counts=(3, 1, 0), **others):
    return {"tokens": i32(tokens), "counts": i32(counts), **others}


def test_what_follows_an_undecided_token_does_not_count_and_the_request_learns_why():
    first, second = read(decoded(tokens=((1, -1, 3), (-1, -7, -7), (-7, -7, -7))), DECODE, [row(0), row(1)])
    assert (first.token_ids, second.token_ids) == ((1,), ())
    for tokens in (first, second):
        assert "more tokens here than the 1024 that these graphs rank" in tokens.failure


@pytest.mark.parametrize("start, drafted", [(13, 2), (14, 1), (15, 0)])
def test_no_draft_beyond_the_longest_context_is_verified(start, drafted):
    rows = (row(0, computed=start),)
    (tokens,) = read(decoded(counts=(1, 0, 0)), DECODE, rows)
    assert tokens.num_drafts == drafted
    message = rf"a count of {drafted + 2} tokens for 'r0', of which {drafted} drafts .* legal is 1 to {drafted + 1}"
    with pytest.raises(NpucompileError, match=message):
        read(decoded(counts=(drafted + 2, 0, 0)), DECODE, rows)


@pytest.mark.parametrize(
    "outputs, message",
    [
        ({"counts": i32([1, 1, 0])}, "returned no tokens; it returned counts"),
        ({"tokens": i32([[1] * 3] * 3)}, "returned no counts; it returned tokens"),
        (decoded([[1] * 2] * 3), r"returned tokens int32\[3, 2\]; legal is int32\[3, 3\]"),
        (decoded([1, 2, 3]), r"returned tokens int32\[3\]; legal is int32\[3, 3\]"),
        (decoded() | {"tokens": np.zeros((3, 3), np.float32)}, r"returned tokens float32\[3, 3\]"),
        (decoded(counts=(1, 1)), r"returned counts int32\[2\]; legal is int32\[3\]"),
        (decoded(counts=(0, 1, 0)), "a count of 0 tokens for 'r0'"),
        (decoded(counts=(4, 1, 0)), "a count of 4 tokens for 'r0', of which 2 drafts were verified; legal is 1 to 3"),
        (decoded(counts=(1, 3, 0)), "a count of 3 tokens for 'r1', of which 1 drafts were verified; legal is 1 to 2"),
        (decoded([[1, 13, 0], [1] * 3, [1] * 3], (2, 1, 0)), r"returned token ids \[1, 13\] for 'r0'; legal is 0 to 12"),
        (decoded([[1, 2, 3], [-3] * 3, [1] * 3]), r"returned token ids \[-3\] for 'r1'"),
        (decoded(), "returned no chosen_logprobs; it returned tokens, counts"),
        (
            decoded(chosen_logprobs=np.zeros((3, 3), np.float32), top_ids=i32(np.zeros((3, 2, 4)))),
            r"returned top_ids int32\[3, 2, 4\]; legal is int32\[3, 3, n\]",
        ),
        (
            decoded(chosen_logprobs=np.zeros((3, 3), np.float32), top_ids=i32(np.zeros((3, 3, 1))), top_logprobs=i32(np.zeros((3, 3, 1)))),
            r"returned top_logprobs int32\[3, 3, 1\]; legal is float32\[3, 3, n\]",
        ),
    ],
)
def test_outputs_that_make_no_sense_are_refused(outputs, message):
    with pytest.raises(NpucompileError, match=message):
        read(outputs, DECODE, (row(0), row(1, drafts=1, logprobs=1)))


def test_what_is_no_number_is_no_token():
    first, second = read(decoded([[1, NON_FINITE, 3], [4, NON_FINITE, 0], [0] * 3]), DECODE, [row(0), row(1, drafts=0)])
    assert (first.token_ids, first.failure, first.not_finite) == ((1,), NOT_FINITE, True)
    # What lies behind the tokens that count does not.
    assert (second.token_ids, second.failure, second.not_finite) == ((4,), "", False)


def test_what_is_no_number_is_seen_in_log_probabilities_where_a_mask_hides_it_from_the_token():
    chosen = np.full((3, 3), -1.0, np.float32)
    chosen[0, 2] = np.nan
    logprobs = {"chosen_logprobs": chosen, "top_ids": np.zeros((3, 3, 2), np.int32), "top_logprobs": np.zeros((3, 3, 2), np.float32)}
    asked, unasked = read(decoded(**logprobs), DECODE, [row(0, logprobs=0), row(1, drafts=0)])
    assert (asked.token_ids, asked.not_finite, len(asked.logprobs)) == ((1, 2), True, 2)
    assert not unasked.not_finite


def test_segments_of_an_encode_step_are_finite_or_not_and_padding_is_not_read():
    bucket = Bucket("encode", 3, 16)
    segment = ScheduledSegment(row(0), toy.picture(0, 1, 1, 5))
    step = ScheduledStep(bucket, (GroupStep((row(0),), segments=(segment, segment)), GroupStep()))
    assert read_finite([{"finite": i32([1, 0, 0])}, {}], step) == ([True, False], ())
    with pytest.raises(NpucompileError, match="returned no finite; it returned tokens"):
        read_finite([{"tokens": i32([1])}, {}], step)
    with pytest.raises(NpucompileError, match=r"returned finite int32\[2\]; legal is int32\[3\]"):
        read_finite([{"finite": i32([1, 1])}, {}], step)


def test_experts_are_counted_of_live_tokens_of_one_group_which_stands_for_all():
    chosen = i32([[[[0, 2]], [[1, 2]], [[3, 3]]], [[[0, 1]], [[9, 9]], [[9, 9]]], [[[9, 9]]] * 3])
    step = ScheduledStep(DECODE, (GroupStep((row(0), row(1, drafts=0))), GroupStep((row(2),)), GroupStep()))
    outputs = [{"experts": chosen}, {"experts": -chosen}, {"experts": chosen}]
    assert count_experts(outputs, step, 0).tolist() == [[6, 6, 6, 6]]
    assert count_experts(outputs, step, 2) is None, "no rows"
    assert count_experts([{}, {}, {}], step, 0) is None
    with pytest.raises(NpucompileError, match="returned expert -3; legal is 0 or more"):
        count_experts(outputs, step, 1)
    with pytest.raises(NpucompileError, match="returned experts int32"):
        count_experts([{"experts": chosen[0]}, {}, {}], step, 0)


def test_of_a_long_chunk_a_token_that_tells_counts_for_those_behind_it():
    prefill = Bucket("prefill", 1, 8)
    chunk = ScheduledRequest(RequestState(Request("r", tuple(range(9)), 4), 0, 0.0), 4, 5)
    told = i32([[[[0, 1]], [[2, 1]], [[3, 3]], [[9, 9]]]])
    assert count_experts([{"experts": told}], ScheduledStep(prefill, (GroupStep((chunk,)),)), 0).tolist() == [[2, 4, 2, 4]]


def scored(prompt, start, count, first=1, **options):
    """A row of a score step, of a prompt that is scored from a position on."""
    request = Request("s", prompt, 9, prompt_logprobs=0, prompt_logprobs_from=first, **options)
    state = RequestState(request, 1, 0.0, num_computed_tokens=start, unscored=request.num_scored, in_chunks=True)
    return ScheduledRequest(state, 4, count)


def chunks(tokens):
    values = np.arange(8, dtype=np.float32).reshape(2, 4)
    none = np.zeros((2, 4, 0), np.float32)
    return {"tokens": i32(tokens), "chosen_logprobs": -values, "top_ids": none.astype(np.int32), "top_logprobs": none}


def test_a_score_step_tells_the_tokens_behind_those_of_its_chunk_and_of_others_what_they_sample():
    plain = ScheduledRequest(RequestState(Request("p", (1, 2), 9, logprobs=0), 2, 0.0), 4, 2)
    first, second = read(chunks([[5, 6, 9, -7], [2, 12, -7, -7]]), SCORE, [scored((4, 5, 6), 0, 3), plain])
    assert (first.token_ids, [entry.logprob for entry in first.logprobs]) == ((5, 6, 9), [0, -1, -2])
    assert (second.token_ids, [entry.logprob for entry in second.logprobs]) == ((12,), [-5])
    # Neither scores or samples: it ends before the first position that is asked for.
    rows = [scored((4, 5, 6, 7, 8), 0, 2), scored((4, 5, 6, 7, 8), 0, 2, first=4)]
    assert [tokens.token_ids for tokens in read(chunks([[5, 6, -7, -7], [5, 6, -7, -7]]), SCORE, rows)] == [(5, 6), ()]
    with pytest.raises(NpucompileError, match=r"token ids \[5, 7\] for 's'; legal is the prompt's \[5, 6\]"):
        read(chunks([[5, 7, -7, -7]] * 2), SCORE, rows[:1])
    with pytest.raises(NpucompileError, match=r"returned tokens int32\[2, 1\]; legal is int32\[2, 4\]"):
        read({"tokens": i32([[1], [1]])}, SCORE, rows)
