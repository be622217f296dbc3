"""tools/prove/speculation.py: counts, drafts, request slots and log probabilities of one rank in one step, right and wrong."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from npucompile.graphs.errors import VerifyError
from npucompile.graphs.types import Bucket
from npucompile.tools.prove.speculation import check_logprobs, check_request_slots, compare_drafts, first_position, same_draft_inputs
from npucompile.tools.prove.step_trace import ExpectedOutputs, TraceStep

V, K = 8, 2


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def leading(*best, lead=1.0):
    """Logits of drafts whose best tokens are these, each by `lead`."""
    logits = torch.zeros(len(best), V)
    for place, token in enumerate(best):
        logits[place, token] = lead
    return logits


def decode(valid=(3, 2), taken=(2, 1)):
    """Rows 0 and 2 of three are live, in request slots 3 and 1: positions 10 and 20, candidates 5 6 7 and 1 2 3."""
    case = SimpleNamespace(bucket=Bucket("decode", 3, K + 1))
    pool = torch.stack([i32(0, 0, 0, 0, 0), i32(20, 2, 1, 2, 3), i32(-7, -7, -7, -7, -7), i32(10, 0, 5, 6, 7)])
    tokens = torch.stack([i32(6, 4, 4), i32(3, 4, 5)])
    drafts = torch.stack([i32(1, 2), i32(3, 4)])
    expected = ExpectedOutputs(
        (0, 2), valid, taken, (True, True), tokens, torch.randn(2, 3, V), drafts, torch.stack([leading(1, 2), leading(3, 4)])
    )
    inputs = {"request_slots": i32(3, 0, 1), "drafts": i32(2, 0, 1)}
    return TraceStep(case, (inputs,), (pool,), (expected,))


def decoded():
    """Right outputs of a rank in that step."""
    pool = torch.stack([i32(0, 0, 0, 0, 0), i32(21, 0, 3, 3, 4), i32(-7, -7, -7, -7, -7), i32(12, 1, 4, 1, 2)])
    return {
        "tokens": torch.stack([i32(6, 4, 4), i32(0, 0, 0), i32(3, 4, 5)]),
        "counts": i32(2, 0, 1),
        "drafts": torch.stack([i32(1, 2), i32(0, 0), i32(3, 4)]),
        "request_slots": pool,
    }


def prefill(following=-1):
    """A chunk of four tokens from position 8 on, of the request in request slot 2."""
    case = SimpleNamespace(bucket=Bucket("prefill", 1, 4))
    pool = torch.stack([i32(0, 0, 0, 0, 0), i32(-7, -7, -7, -7, -7), i32(8, 0, 7, 7, 7)])
    expected = ExpectedOutputs((0,), (1,), (4,), (True,), i32(6)[None], torch.randn(1, 1, V), i32(1, 2)[None], leading(1, 2)[None])
    inputs = {"request_slots": i32(2), "num_computed_tokens": i32(8), "query_lens": i32(4), "next_tokens": i32(following)}
    return TraceStep(case, (inputs,), (pool,), (expected,))


def prefilled():
    pool = torch.stack([i32(0, 0, 0, 0, 0), i32(-7, -7, -7, -7, -7), i32(12, 0, 6, 1, 2)])
    return {"tokens": i32(6)[None], "drafts": i32(1, 2)[None], "request_slots": pool}


def spoiled(outputs, name, at, value):
    changed = outputs[name].clone()
    changed[at] = value
    return {**outputs, name: changed}


def test_what_follows_is_accepted():
    check_request_slots(decode(), 0, decoded(), "it")
    check_request_slots(prefill(), 0, prefilled(), "it")
    assert (first_position(decode(), 0, 2), first_position(prefill(), 0, 0)) == (20, 8)


def test_what_follows_a_prompt_with_pictures_starts_at_the_position_behind_it():
    """Index 12 follows, at position 9 on the first axis; each candidate has the same offset and its place."""
    step, outputs = prefill(), prefilled()
    pool = torch.cat([step.request_slots[0], torch.full((3, 4), -7, dtype=torch.int32)], 1)
    inputs = {**step.inputs[0], "positions": torch.tensor([[[5, 5, 5], [6, 6, 6], [7, 7, 7], [8, 8, 8]]], dtype=torch.int32)}
    step = TraceStep(step.case, (inputs,), (pool,), step.expected)
    after = torch.cat([outputs["request_slots"], pool[:, -4:]], 1)
    after[2, -4:] = i32(-3, -3, -2, -1)
    check_request_slots(step, 0, {**outputs, "request_slots": after}, "it")
    with pytest.raises(VerifyError, match=r"request slot 2 holds .*-3, -3, -3, -1\]; what the next step starts from is .*-3, -3, -2, -1\]"):
        check_request_slots(step, 0, {**outputs, "request_slots": spoiled({"it": after}, "it", (2, -2), -3)["it"]}, "it")


def test_a_step_of_few_drafts_fills_a_request_slot_with_the_last_token():
    step, outputs = decode(), decoded()
    wider = i32(0, 4, -7, 4)[:, None]
    before = torch.cat([step.request_slots[0], torch.full((4, 1), -7, dtype=torch.int32)], 1)
    before[0, -1] = 0
    step = TraceStep(step.case, step.inputs, (before,), step.expected)
    after = torch.cat([outputs["request_slots"], wider], 1)
    after[1, -1] = 3
    check_request_slots(step, 0, {**outputs, "request_slots": after}, "it", room=K + 1)
    after[3, -1] = -7
    with pytest.raises(VerifyError, match=r"request slot 3 holds \[12, 1, 4, 1, 2, -7\]; what the next step starts from is .* 2, 4\]"):
        check_request_slots(step, 0, {**outputs, "request_slots": after}, "it", room=K + 1)


def test_a_group_that_idles_leaves_its_request_slots_as_they_are():
    step = decode()
    idle = TraceStep(step.case, ({"request_slots": i32(0, 0, 0)},), step.request_slots, (None,))
    outputs = {**decoded(), "counts": i32(0, 0, 0), "request_slots": step.request_slots[0]}
    check_request_slots(idle, 0, outputs, "it")
    with pytest.raises(VerifyError, match=r"it: counts are \[1, 0, 0\]; by the tokens it sampled they are \[0, 0, 0\]"):
        check_request_slots(idle, 0, {**outputs, "counts": i32(1, 0, 0)}, "it")
    with pytest.raises(VerifyError, match=r"it: request slot 2 holds \[-7, -7, -7, -7, 0\]"):
        check_request_slots(idle, 0, spoiled(outputs, "request_slots", (2, 4), 0), "it")


@pytest.mark.parametrize(
    ("valid", "sampled", "count"),
    [
        (3, (6, 7, 4), 3),
        (3, (6, 4, 4), 2),
        (3, (4, 7, 4), 1),  # the first draft is wrong, so the second does not count though it equals the token after it
        (2, (6, 7, 4), 2),
        (1, (6, 7, 4), 1),
    ],
)
def test_drafts_count_up_to_the_first_wrong_one_or_as_far_as_they_are_verified(valid, sampled, count):
    step, outputs = decode(valid=(valid, 2)), spoiled(decoded(), "tokens", 0, i32(*sampled))
    outputs = spoiled(spoiled(outputs, "counts", 0, count), "request_slots", 3, i32(10 + count, count - 1, sampled[count - 1], 1, 2))
    check_request_slots(step, 0, outputs, "it")
    for wrong in {0, 1, 2, 3} - {count}:
        with pytest.raises(VerifyError, match=rf"it: counts are \[{wrong}, 0, 1\]; by the tokens it sampled they are \[{count}, 0, 1\]"):
            check_request_slots(step, 0, spoiled(outputs, "counts", 0, wrong), "it")


@pytest.mark.parametrize("request_slot", range(4))
@pytest.mark.parametrize("column", range(5))
def test_every_number_of_every_request_slot_is_looked_at(request_slot, column):
    outputs = decoded()
    value = int(outputs["request_slots"][request_slot, column]) + 1
    with pytest.raises(VerifyError, match=rf"it: request slot {request_slot} holds "):
        check_request_slots(decode(), 0, spoiled(outputs, "request_slots", (request_slot, column), value), "it")
    if request_slot < 3:
        with pytest.raises(VerifyError, match=rf"it: request slot {request_slot} holds "):
            check_request_slots(prefill(), 0, spoiled(prefilled(), "request_slots", (request_slot, column), 9), "it")


def test_the_draft_head_reads_the_accepted_tokens():
    step, outputs = decode(), decoded()
    assert same_draft_inputs(step, 0, 0, outputs)
    assert same_draft_inputs(step, 0, 1, outputs)
    assert same_draft_inputs(step, 0, 0, spoiled(outputs, "tokens", (0, 2), 0)), "the token was not accepted"
    assert not same_draft_inputs(step, 0, 0, spoiled(outputs, "tokens", (0, 1), 0))
    assert not same_draft_inputs(step, 0, 1, spoiled(outputs, "tokens", (2, 0), 0))


def test_after_a_chunk_that_is_not_the_last_the_token_is_known():
    changed = spoiled(prefilled(), "tokens", (0, 0), 5)
    assert same_draft_inputs(prefill(), 0, 0, prefilled())
    assert not same_draft_inputs(prefill(), 0, 0, changed)
    assert same_draft_inputs(prefill(following=0), 0, 0, changed)


def error(*values):
    return torch.tensor(values)


def test_a_draft_must_be_the_traces_where_it_leads_by_more_than_the_difference():
    equal, bound = compare_drafts(decode(), 0, decoded(), error(0.1, 0.6), 1e-3)
    assert equal.tolist() == [[True, True], [True, True]]
    # Each leads by 1; twice the difference is allowed.
    assert bound.tolist() == [[True, True], [False, False]]
    assert compare_drafts(decode(), 0, decoded(), error(0.0, 0.0), 0.5)[1].any().item() is False
    assert compare_drafts(decode(), 0, decoded(), error(0.0, 0.0), 0.49)[1].all().item() is True


def test_what_follows_another_draft_or_another_token_is_not_bound():
    equal, bound = compare_drafts(decode(), 0, spoiled(decoded(), "drafts", (0, 0), 0), error(0.0, 0.0), 1e-3)
    assert (equal.tolist(), bound.tolist()) == ([[False, True], [True, True]], [[True, False], [True, True]])
    _, bound = compare_drafts(decode(), 0, spoiled(decoded(), "tokens", (2, 0), 0), error(0.0, 0.0), 1e-3)
    assert bound.tolist() == [[True, True], [False, False]]


def logprob_outputs(expected, most=3):
    """Right log probabilities of a rank in a step."""
    right = torch.zeros(3, K + 1, V)
    right[[0, 2]] = expected.logits.log_softmax(-1)
    values, ids = right.topk(most)
    tokens = decoded()["tokens"]
    return {
        "tokens": tokens,
        "chosen_logprobs": right.gather(-1, tokens[..., None].long()).squeeze(-1),
        "top_logprobs": values,
        "top_ids": ids.int(),
    }


def test_log_probabilities_are_those_of_the_logits():
    torch.manual_seed(0)
    expected = decode().expected[0]
    outputs, slack = logprob_outputs(expected), torch.full((2, K + 1), 1e-4)
    check_logprobs(expected, i32(1, 0, 1), outputs, slack, "it")
    wrong = [
        spoiled(outputs, "chosen_logprobs", (0, 2), -0.5),
        spoiled(outputs, "top_logprobs", (2, 1, 0), -0.01),
        spoiled(outputs, "top_ids", (0, 0, 2), int(outputs["top_ids"][0, 0, 0])),
        spoiled(outputs, "chosen_logprobs", (0, 0), float("nan")),
    ]
    for spoilt, row in zip(wrong, (0, 2, 0, 0), strict=True):
        with pytest.raises(VerifyError, match=rf"it: log probabilities of row {row} are off by"):
            check_logprobs(expected, i32(1, 0, 1), spoilt, slack, "it")
        check_logprobs(expected, i32(int(row == 2), 1, int(row == 0)), spoilt, slack, "it")
    # The third candidate of the second row is not valid.
    check_logprobs(expected, i32(1, 0, 1), spoiled(outputs, "chosen_logprobs", (2, 2), 5.0), slack, "it")
    check_logprobs(expected, i32(1, 0, 1), wrong[0], torch.full((2, K + 1), 10.0), "it")
