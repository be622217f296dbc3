"""tools/prove/step_trace.py: a trace has idle groups, padding, chunks, right and wrong drafts, and reads only what was written."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch
from support import small_images as images

from npucompile.graphs.types import Limits
from npucompile.models.request_slots import ACCEPTED, START, TOKENS
from npucompile.tools.agreement.pools import filled_pages, request_slot_pool
from npucompile.tools.prove.small_model import random_checkpoint, shrink
from npucompile.tools.prove.step_trace import GREEDY, SAMPLED, UNOWNED, record_trace

BOTH, DECODE, PREFILL = ("prefill", "decode"), ("decode",), ("prefill",)


@pytest.fixture(scope="module")
def image():
    return images.image("dp=3", BOTH, steps=6)


def steps_of(image, kind):
    return [step for step in image.trace.steps if step.case.form.kind == kind]


def live(step, group):
    return step.expected[group].rows if step.expected[group] else ()


def start(step, group, row):
    """Tokens of a row's request in the caches before a step."""
    inputs = step.inputs[group]
    if step.case.form.kind == "prefill":
        return int(inputs["num_computed_tokens"][row])
    return int(step.request_slots[group][inputs["request_slots"][row], START])


def by_request(image, group):
    """Each request's steps in order, as (step, row), by request slot."""
    steps = {}
    for step in image.trace.steps:
        for row in live(step, group):
            steps.setdefault(int(step.inputs[group]["request_slots"][row]), []).append((step, row))
    return steps


def decoded(steps):
    return [(step, row) for step, row in steps if step.case.form.kind == "decode"]


def test_prompts_come_first_and_groups_have_different_requests(image):
    kinds = [step.case.form.kind for step in image.trace.steps]
    assert kinds == ["prefill"] * kinds.count("prefill") + ["decode"] * 6
    assert [len(by_request(image, group)) for group in range(3)] == [3, 1, 1]
    prompts = [sum(int(step.inputs[group]["query_lens"].sum()) for step in steps_of(image, "prefill")) for group in range(3)]
    assert len(set(prompts)) == 3
    assert not torch.equal(steps_of(image, "prefill")[0].inputs[0]["tokens"], steps_of(image, "prefill")[0].inputs[1]["tokens"])


def test_the_last_group_idles_while_others_work_and_works_while_they_idle(image):
    working = [tuple(bool(live(step, group)) for group in range(3)) for step in image.trace.steps]
    assert (True, True, False) in working
    assert (False, False, True) in working
    assert (True, True, True) in working
    for step in image.trace.steps:
        for group in range(3):
            if not live(step, group):
                assert int(step.inputs[group]["request_slots"].sum()) == 0
                assert int(step.inputs[group]["page_table"].sum()) == 0


def test_decode_has_an_odd_number_of_rows_at_changing_places_and_padding(image):
    rows = [live(step, 0) for step in steps_of(image, "decode")]
    assert {len(some) for some in rows} == {3}
    assert len(set(rows)) > 1
    for step in steps_of(image, "decode"):
        (empty,) = set(range(4)) - set(live(step, 0))
        assert not any(
            int(step.inputs[0][name][empty].sum()) for name in ("request_slots", "drafts", "base", "page_table", "state_slots_out")
        )


def test_a_prompt_is_read_in_chunks_that_follow_each_other_and_know_what_comes_next(image):
    prompts = [[(step, row) for step, row in steps if step.case.form.kind == "prefill"] for steps in by_request(image, 0).values()]
    (chunks,) = ([(step.inputs[0], row) for step, row in steps] for steps in prompts if len(steps) > 1)
    assert [(int(inputs["num_computed_tokens"][row]), int(inputs["query_lens"][row])) for inputs, row in chunks] == [(0, 40), (40, 37)]
    (first, row), (second, there) = chunks
    assert int(first["next_tokens"][row]) == int(second["tokens"][there, 0])
    assert int(second["next_tokens"][there]) == -1


def test_a_step_continues_after_the_tokens_that_the_last_one_accepted(image):
    for steps in by_request(image, 0).values():
        for (step, row), (after, there) in pairwise(decoded(steps)):
            inputs, expected = step.inputs[0], step.expected[0]
            place = expected.rows.index(row)
            tokens, candidates = expected.tokens[place].tolist(), step.request_slots[0][inputs["request_slots"][row], TOKENS:].tolist()
            count = start(after, 0, there) - start(step, 0, row)
            assert count == expected.taken[place]
            assert 1 <= count <= expected.valid[place]
            assert candidates[1:count] == tokens[: count - 1]
            assert count == expected.valid[place] or candidates[count] != tokens[count - 1]
            request_slot = after.request_slots[0][after.inputs[0]["request_slots"][there]].tolist()
            assert (request_slot[ACCEPTED], request_slot[TOKENS]) == (count - 1, tokens[count - 1])


@pytest.mark.parametrize("drafts", [0, 1, 3, 7])
def test_every_number_of_drafts_is_accepted_and_some_rows_verify_fewer(drafts):
    """One group of three requests, one of them near the end of its context, in the fewest steps."""
    image = images.image("dp=1,tp=2", BOTH, steps=1, drafts=drafts)
    expected = [(step, expected) for step in steps_of(image, "decode") for expected in step.expected if expected]
    counts = Counter(count for _, outputs in expected for count in outputs.taken)
    assert set(counts) == set(range(1, drafts + 2))
    verified = [int(step.inputs[0]["drafts"][row]) for step, outputs in expected for row in outputs.rows]
    assert max(verified) == drafts
    assert verified.count(drafts) >= drafts + 1
    assert not drafts or min(verified) < drafts


def test_drafts_that_are_right_are_not_accepted_where_they_are_not_to_be_verified(image):
    unverified = 0
    for group in range(3):
        for steps in by_request(image, group).values():
            for step, row in decoded(steps):
                expected, inputs = step.expected[group], step.inputs[group]
                place, drafts = expected.rows.index(row), int(inputs["drafts"][row])
                candidates = step.request_slots[group][inputs["request_slots"][row], TOKENS:].tolist()
                room = image.small.limits.max_model_len - start(step, group, row)
                assert expected.valid[place] == min(1 + drafts, room)
                unverified += expected.taken[place] == 1 + drafts < 3 and candidates[1 + drafts] == expected.tokens[place, drafts]
    assert unverified > 0


def test_a_host_that_has_not_read_the_last_step_yet_gives_the_smallest_position(image):
    behind = Counter()
    for step in steps_of(image, "decode"):
        for group in range(3):
            for row in live(step, group):
                behind[start(step, group, row) - int(step.inputs[group]["base"][row])] += 1
    assert set(behind) == {0, 1, 2}


def test_one_request_reaches_the_end_of_its_context(image):
    most = image.small.limits.max_model_len
    ends = [steps for steps in by_request(image, 0).values() if start(steps[0][0], 0, steps[0][1]) > most // 2]
    (steps,) = ends
    assert len(steps) == 6
    last, row = steps[-1]
    expected = last.expected[0]
    place = expected.rows.index(row)
    assert start(last, 0, row) + expected.taken[place] == most
    assert expected.valid[place] < 3
    assert any(expected.taken[expected.rows.index(row)] > 1 for step, row in steps for expected in [step.expected[0]])


def test_unowned_request_slots_hold_what_would_be_noticed_and_the_null_request_slot_zeros(image):
    at = request_slot_pool(image.trace.leaves)
    for group in range(3):
        owned = set(by_request(image, group))
        pool = image.trace.steps[-1].after[group][at]
        unowned = set(range(1, len(pool))) - owned
        assert unowned
        assert all(pool[request_slot].tolist() == [UNOWNED] * pool.shape[1] for request_slot in unowned)
        assert pool[0].tolist() == [0] * pool.shape[1]
        assert all(pool[request_slot, START] > 0 for request_slot in owned)


def test_expected_values_are_finite_where_they_count_and_state_is_nan_where_nothing_was_written(image):
    for step in image.trace.steps:
        for expected in filter(None, step.expected):
            for logits, valid in zip(expected.logits, expected.valid, strict=True):
                assert bool(torch.isfinite(logits[:valid]).all())
                assert float(logits[:valid].std()) > 0.1
            assert torch.equal(expected.draft_logits.argmax(-1).int(), expected.drafts)
            assert float(expected.draft_logits.std()) > 0.1
    assert [steps[0][0].case.form.kind for steps in by_request(image, 0).values()].count("decode") == 1
    for group in range(3):
        end = image.trace.steps[-1]
        for leaf, first, last in zip(image.trace.leaves, image.trace.steps[0].before[group], end.after[group], strict=True):
            if leaf.aval.axes[0] == "request_slots":
                continue
            assert bool(torch.isnan(first).all()) == (group > 0)
            if leaf.aval.axes[0] == "pages":
                filled = [place for row in end.rows[group] for place in filled_pages(row.pages, row.start, leaf.aval.shape[1])]
                assert sum(used for _, used in filled) > 0
                assert all(bool(torch.isfinite(last[page, :used]).all()) for page, used in filled)
            else:
                assert bool(torch.isfinite(last[[slot for row in end.rows[group] for slot in row.slots]]).all())
                unowned = set(range(1, last.shape[0])) - {s for steps in by_request(image, group).values() for s in slots_of(steps, group)}
                assert unowned
                assert bool(torch.isnan(last[sorted(unowned)]).all())


def slots_of(steps, group):
    return {slot for step, row in steps for slot in step.inputs[group]["state_slots_out"][row].tolist()}


def test_some_rows_sample_and_most_do_not(image):
    greedy = [flag for step in image.trace.steps for expected in filter(None, step.expected) for flag in expected.greedy]
    assert 0 < greedy.count(False) < greedy.count(True)
    for step in image.trace.steps:
        for group, expected in enumerate(step.expected):
            for row, flag in zip(expected.rows, expected.greedy, strict=True) if expected else ():
                assert step.inputs[group]["temperature"][row] == pytest.approx((GREEDY if flag else SAMPLED)["temperature"])


def test_without_prefill_requests_begin_with_a_state_that_was_sent_to_them():
    image = images.image("dp=2", DECODE)
    step = image.trace.steps[0]
    row = live(step, 0)[0]
    request_slot = step.request_slots[0][step.inputs[0]["request_slots"][row]].tolist()
    assert request_slot[START] > 0
    assert request_slot[ACCEPTED] == 0
    slot, page = int(step.inputs[0]["state_slots_out"][row, 0]), int(step.inputs[0]["page_table"][row, 0])
    for leaf, pool in zip(image.trace.leaves, image.trace.steps[0].before[0], strict=True):
        if leaf.aval.axes[0] == "request_slots":
            continue
        filled = pool[page, : request_slot[START]] if leaf.aval.axes[0] == "pages" else pool[slot]
        assert bool(torch.isfinite(filled).all())
        assert bool(torch.isnan(pool).any())


def test_an_instance_that_only_prefills_drafts_and_fills_its_request_slots():
    image = images.image("dp=2", PREFILL, drafts=3)
    assert image.small.limits.slots_per_request == 1
    pool = image.trace.steps[-1].after[0][request_slot_pool(image.trace.leaves)]
    assert pool.shape[1] == TOKENS + 4
    last = image.trace.steps[-1]
    expected, inputs = last.expected[1], last.inputs[1]
    request_slot = int(inputs["request_slots"][expected.rows[0]])
    position = start(last, 1, expected.rows[0]) + expected.taken[0]
    values = [position, 0, int(expected.tokens[0, 0]), *expected.drafts[0].tolist()]
    assert image.trace.steps[-1].after[1][request_slot_pool(image.trace.leaves)][request_slot].tolist() == values


def test_steps_of_several_widths_verify_what_has_room_in_each():
    entries = [images.entry("prefill", 1, 40), *(images.entry("decode", 4, width) for width in (1, 2, 4))]
    small = shrink(images.manifest(mesh="dp=1", quantization="none", graphs=tuple(entries), limits=Limits(128, 99, 99, 1024, 4, 3)), 4)
    generator = torch.Generator().manual_seed(0)
    trace = record_trace(small, random_checkpoint(small.model, generator), generator)
    most: dict[int, int] = {}
    for step in trace.steps:
        if step.case.form.kind == "decode":
            width, drafts = step.case.bucket.q_len, int(step.inputs[0]["drafts"].max())
            most[width] = max(most.get(width, 0), drafts)
            assert all(taken <= valid <= width for taken, valid in zip(step.expected[0].taken, step.expected[0].valid, strict=True))
    assert most == {1: 0, 2: 1, 4: 3}
