"""tools/verify/step_trace.py: a script covers idle groups, padding, chunks, right and wrong drafts, and reads nothing unwritten."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch
from support import small_images as images

from npucompile.models.request_slots import ACCEPTED, START, TOKENS
from npucompile.tools.verify.step_trace import GREEDY, NOBODYS, SAMPLED, rehearse, seat_pool

BOTH, DECODE, PREFILL = ("prefill", "decode"), ("decode",), ("prefill",)


@pytest.fixture(scope="module")
def image():
    return images.image("dp=3", BOTH, steps=6)


def turns(image, kind):
    return [turn for turn in image.script.turns if turn.case.form.kind == kind]


def live(turn, group):
    return turn.expected[group].rows if turn.expected[group] else ()


def start(turn, group, row):
    """Tokens of a row's request in the caches before a step."""
    inputs = turn.inputs[group]
    if turn.case.form.kind == "prefill":
        return int(inputs["starts"][row])
    return int(turn.seats[group][inputs["seats"][row], START])


def by_request(image, group):
    """Each request's steps in order: (turn, row), told apart by their seat."""
    found = {}
    for turn in image.script.turns:
        for row in live(turn, group):
            found.setdefault(int(turn.inputs[group]["seats"][row]), []).append((turn, row))
    return found


def decoded(steps):
    return [(turn, row) for turn, row in steps if turn.case.form.kind == "decode"]


def test_prompts_come_first_and_groups_have_different_requests(image):
    kinds = [turn.case.form.kind for turn in image.script.turns]
    assert kinds == ["prefill"] * kinds.count("prefill") + ["decode"] * 6
    assert [len(by_request(image, group)) for group in range(3)] == [3, 1, 1]
    prompts = [sum(int(turn.inputs[group]["lengths"].sum()) for turn in turns(image, "prefill")) for group in range(3)]
    assert len(set(prompts)) == 3
    assert not torch.equal(turns(image, "prefill")[0].inputs[0]["tokens"], turns(image, "prefill")[0].inputs[1]["tokens"])


def test_the_last_group_idles_while_others_work_and_works_while_they_idle(image):
    told = [tuple(bool(live(turn, group)) for group in range(3)) for turn in image.script.turns]
    assert (True, True, False) in told
    assert (False, False, True) in told
    assert (True, True, True) in told
    for turn in image.script.turns:
        for group in range(3):
            if not live(turn, group):
                assert int(turn.inputs[group]["seats"].sum()) == 0
                assert int(turn.inputs[group]["page_table"].sum()) == 0


def test_decode_has_an_odd_number_of_rows_at_changing_places_and_padding(image):
    rows = [live(turn, 0) for turn in turns(image, "decode")]
    assert {len(some) for some in rows} == {3}
    assert len(set(rows)) > 1
    for turn in turns(image, "decode"):
        (empty,) = set(range(4)) - set(live(turn, 0))
        assert not any(int(turn.inputs[0][name][empty].sum()) for name in ("seats", "drafts", "base", "page_table", "write_slots"))


def test_a_prompt_is_read_in_chunks_that_follow_each_other_and_know_what_comes_next(image):
    prompts = [[(turn, row) for turn, row in steps if turn.case.form.kind == "prefill"] for steps in by_request(image, 0).values()]
    (chunks,) = ([(turn.inputs[0], row) for turn, row in steps] for steps in prompts if len(steps) > 1)
    assert [(int(inputs["starts"][row]), int(inputs["lengths"][row])) for inputs, row in chunks] == [(0, 40), (40, 37)]
    (first, row), (second, there) = chunks
    assert int(first["next_tokens"][row]) == int(second["tokens"][there, 0])
    assert int(second["next_tokens"][there]) == -1


def test_state_slots_follow_the_contract_of_the_recurrent_operator(image):
    for steps in by_request(image, 0).values():
        own = {tuple(turn.inputs[0]["write_slots"][row].tolist()) for turn, row in decoded(steps)}
        assert len(own) == 1
        assert len(set(own.pop()) - {0}) == 3
        for turn, row in decoded(steps):
            assert 0 <= int(turn.seats[0][turn.inputs[0]["seats"][row], ACCEPTED]) < 3


def test_a_step_goes_on_behind_the_tokens_that_the_last_one_accepted(image):
    for steps in by_request(image, 0).values():
        for (turn, row), (after, there) in pairwise(decoded(steps)):
            inputs, told = turn.inputs[0], turn.expected[0]
            place = told.rows.index(row)
            said, given = told.tokens[place].tolist(), turn.seats[0][inputs["seats"][row], TOKENS:].tolist()
            count = start(after, 0, there) - start(turn, 0, row)
            assert count == told.taken[place]
            assert 1 <= count <= told.valid[place]
            assert given[1:count] == said[: count - 1]
            assert count == told.valid[place] or given[count] != said[count - 1]
            seat = after.seats[0][after.inputs[0]["seats"][there]].tolist()
            assert (seat[ACCEPTED], seat[TOKENS]) == (count - 1, said[count - 1])


@pytest.mark.parametrize("drafts", [0, 1, 3, 7])
def test_every_number_of_drafts_is_accepted_and_some_rows_verify_fewer(drafts):
    """One group of three requests, one of which nears its end, and no more steps than there must be."""
    image = images.image("dp=1,tp=2", BOTH, steps=1, drafts=drafts)
    told = [(turn, told) for turn in turns(image, "decode") for told in turn.expected if told]
    counts = Counter(taken for _, one in told for taken in one.taken)
    assert set(counts) == set(range(1, drafts + 2))
    verified = [int(turn.inputs[0]["drafts"][row]) for turn, one in told for row in one.rows]
    assert max(verified) == drafts
    assert verified.count(drafts) >= drafts + 1
    assert not drafts or min(verified) < drafts


def test_drafts_that_are_right_are_not_accepted_where_they_are_not_to_be_verified(image):
    found = 0
    for group in range(3):
        for steps in by_request(image, group).values():
            for turn, row in decoded(steps):
                told, inputs = turn.expected[group], turn.inputs[group]
                place, asked = told.rows.index(row), int(inputs["drafts"][row])
                given = turn.seats[group][inputs["seats"][row], TOKENS:].tolist()
                room = image.small.limits.max_model_len - start(turn, group, row)
                assert told.valid[place] == min(1 + asked, room)
                found += told.taken[place] == 1 + asked < 3 and given[1 + asked] == told.tokens[place, asked]
    assert found > 0


def test_a_host_that_has_not_read_the_last_step_yet_gives_the_smallest_place(image):
    behind = Counter()
    for turn in turns(image, "decode"):
        for group in range(3):
            for row in live(turn, group):
                behind[start(turn, group, row) - int(turn.inputs[group]["base"][row])] += 1
    assert set(behind) == {0, 1, 2}


def test_pages_are_there_for_what_is_drafted(image):
    size, most = image.small.limits.page_size, image.small.limits.max_model_len
    for turn in turns(image, "decode"):
        for group in range(3):
            for row in live(turn, group):
                held = int((turn.inputs[group]["page_table"][row] > 0).sum()) * size
                # Candidates, and a key of each draft but the last.
                assert held >= min(start(turn, group, row) + 3 + 1, most)


def test_one_request_reaches_the_end_of_its_context(image):
    most = image.small.limits.max_model_len
    ends = [steps for steps in by_request(image, 0).values() if start(steps[0][0], 0, steps[0][1]) > most // 2]
    (steps,) = ends
    assert len(steps) == 6
    last, row = steps[-1]
    told = last.expected[0]
    place = told.rows.index(row)
    assert start(last, 0, row) + told.taken[place] == most
    assert told.valid[place] < 3
    assert any(told.taken[told.rows.index(row)] > 1 for turn, row in steps for told in [turn.expected[0]])


def test_seats_of_nobody_hold_what_would_be_noticed_and_the_null_seat_nothing(image):
    at = seat_pool(image.script.leaves)
    for group in range(3):
        owned = set(by_request(image, group))
        pool = image.script.last[group][at]
        nobodys = set(range(1, len(pool))) - owned
        assert nobodys
        assert all(pool[seat].tolist() == [NOBODYS] * pool.shape[1] for seat in nobodys)
        assert pool[0].tolist() == [0] * pool.shape[1]
        assert all(pool[seat, START] > 0 for seat in owned)


def test_expected_values_are_finite_where_they_count_and_state_is_nan_where_nothing_was_written(image):
    for turn in image.script.turns:
        for told in filter(None, turn.expected):
            for logits, valid in zip(told.logits, told.valid, strict=True):
                assert bool(torch.isfinite(logits[:valid]).all())
                assert float(logits[:valid].std()) > 0.1
            assert torch.equal(told.thoughts.argmax(-1).int(), told.drafts)
            assert float(told.thoughts.std()) > 0.1
    assert [steps[0][0].case.form.kind for steps in by_request(image, 0).values()].count("decode") == 1
    for group in range(3):
        for leaf, first, last in zip(image.script.leaves, image.script.first[group], image.script.last[group], strict=True):
            if leaf.aval.axes[0] == "seats":
                continue
            assert bool(torch.isnan(first).all()) == (group > 0)
            if leaf.aval.axes[0] == "pages":
                held = sum(used for _, used in image.script.pages[group])
                assert held > 0
                assert all(bool(torch.isfinite(last[page, :used]).all()) for page, used in image.script.pages[group])
            else:
                assert bool(torch.isfinite(last[list(image.script.slots[group])]).all())
                unowned = set(range(1, last.shape[0])) - {s for steps in by_request(image, group).values() for s in slots_of(steps, group)}
                assert unowned
                assert bool(torch.isnan(last[sorted(unowned)]).all())


def slots_of(steps, group):
    return {slot for turn, row in steps for slot in turn.inputs[group]["write_slots"][row].tolist()}


def test_some_rows_sample_and_most_do_not(image):
    greedy = [flag for turn in image.script.turns for told in filter(None, turn.expected) for flag in told.greedy]
    assert 0 < greedy.count(False) < greedy.count(True)
    for turn in image.script.turns:
        for group, told in enumerate(turn.expected):
            for row, flag in zip(told.rows, told.greedy, strict=True) if told else ():
                assert turn.inputs[group]["temperature"][row] == pytest.approx((GREEDY if flag else SAMPLED)["temperature"])


def test_without_prefill_requests_begin_with_a_state_that_was_sent_to_them():
    image = images.image("dp=2", DECODE)
    turn = image.script.turns[0]
    row = live(turn, 0)[0]
    seat = turn.seats[0][turn.inputs[0]["seats"][row]].tolist()
    assert seat[START] > 0
    assert seat[ACCEPTED] == 0
    slot, page = int(turn.inputs[0]["write_slots"][row, 0]), int(turn.inputs[0]["page_table"][row, 0])
    for leaf, pool in zip(image.script.leaves, image.script.first[0], strict=True):
        if leaf.aval.axes[0] == "seats":
            continue
        held = pool[page, : seat[START]] if leaf.aval.axes[0] == "pages" else pool[slot]
        assert bool(torch.isfinite(held).all())
        assert bool(torch.isnan(pool).any())


def test_an_instance_that_only_prefills_drafts_and_fills_its_seats():
    image = images.image("dp=2", PREFILL, drafts=3)
    assert image.small.limits.slots_per_request == 1
    pool = image.script.last[0][seat_pool(image.script.leaves)]
    assert pool.shape[1] == TOKENS + 4
    last = image.script.turns[-1]
    told, inputs = last.expected[1], last.inputs[1]
    seat = int(inputs["seats"][told.rows[0]])
    taken = start(last, 1, told.rows[0]) + told.taken[0]
    wanted = [taken, 0, int(told.tokens[0, 0]), *told.drafts[0].tolist()]
    assert image.script.last[1][seat_pool(image.script.leaves)][seat].tolist() == wanted


def test_a_seed_gives_the_same_script_and_another_one_another():
    image = images.image("dp=2", DECODE)

    def again(seed):
        return rehearse(image.small, image.checkpoint, torch.Generator().manual_seed(seed)).turns

    one, same, other = again(1), again(1), again(2)
    assert all(torch.equal(a.inputs[0]["uniform"], b.inputs[0]["uniform"]) for a, b in zip(one, same, strict=True))
    assert all(torch.equal(a.seats[0], b.seats[0]) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one[0].seats[0], other[0].seats[0])
