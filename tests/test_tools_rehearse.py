"""tools/rehearse.py: a script has what a runtime may do: idle groups, padding, chunks, drafts right and wrong, nothing read unwritten."""

from __future__ import annotations

import importlib.util
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from npucompile.tools.rehearse import GREEDY, SAMPLED, rehearse


def beside(name):
    """A file of helpers beside this one; importlib mode has no sibling imports."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


images = beside("small_images")
BOTH, DECODE = ("prefill", "decode"), ("decode",)


@pytest.fixture(scope="module")
def image():
    return images.image("dp=3", BOTH, steps=6)


def turns(image, kind):
    return [turn for turn in image.script.turns if turn.case.form.kind == kind]


def live(turn, group):
    return turn.expected[group].rows if turn.expected[group] else ()


def by_request(image, group):
    """Each request's steps in order: (turn, row), told apart by their last slot."""
    found = {}
    for turn in image.script.turns:
        for row in live(turn, group):
            owner = int(turn.inputs[group]["page_table"][row, 0])
            found.setdefault(owner, []).append((turn, row))
    return found


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
                assert int(turn.inputs[group]["lengths"].sum()) == 0
                assert int(turn.inputs[group]["page_table"].sum()) == 0


def test_decode_has_an_odd_number_of_rows_at_changing_places_and_padding(image):
    rows = [live(turn, 0) for turn in turns(image, "decode")]
    assert {len(some) for some in rows} == {3}
    assert len(set(rows)) > 1
    for turn in turns(image, "decode"):
        (empty,) = set(range(4)) - set(live(turn, 0))
        assert not any(int(turn.inputs[0][name][empty].sum()) for name in ("lengths", "starts", "page_table", "read_slots", "write_slots"))


def test_a_prompt_is_read_in_chunks_that_follow_each_other(image):
    longest = max(by_request(image, 0).values(), key=lambda steps: int(steps[-1][0].inputs[0]["starts"][steps[-1][1]]))
    chunks = [(turn.inputs[0], row) for turn, row in longest if turn.case.form.kind == "prefill"]
    assert [(int(inputs["starts"][row]), int(inputs["lengths"][row])) for inputs, row in chunks] == [(0, 40), (40, 37)]


def test_state_slots_follow_the_contract_of_the_recurrent_operator(image):
    for steps in by_request(image, 0).values():
        decoded = [(turn.inputs[0], row) for turn, row in steps if turn.case.form.kind == "decode"]
        own = {tuple(inputs["write_slots"][row].tolist()) for inputs, row in decoded}
        assert len(own) == 1
        assert all(int(inputs["read_slots"][row]) in own.copy().pop() for inputs, row in decoded)
        assert len(set(own.pop()) - {0}) == 3


def test_a_step_goes_on_behind_the_tokens_that_the_last_one_accepted(image):
    counts = []
    for steps in by_request(image, 0).values():
        decoded = [(turn, row) for turn, row in steps if turn.case.form.kind == "decode"]
        for (turn, row), (after, there) in pairwise(decoded):
            inputs, told = turn.inputs[0], turn.expected[0]
            place = told.rows.index(row)
            said, given = told.tokens[place].tolist(), inputs["tokens"][row].tolist()
            accepted = int(after.inputs[0]["starts"][there]) - int(inputs["starts"][row])
            assert 1 <= accepted <= told.valid[place]
            assert given[1:accepted] == said[: accepted - 1]
            assert accepted == told.valid[place] or given[accepted] != said[accepted - 1]
            assert int(after.inputs[0]["tokens"][there, 0]) == said[accepted - 1]
            assert int(after.inputs[0]["read_slots"][there]) == int(inputs["write_slots"][row, accepted - 1])
            counts.append(accepted)
    assert set(counts) == {1, 2, 3}


def test_some_steps_have_fewer_candidates_than_room(image):
    lengths = {int(turn.inputs[0]["lengths"][row]) for turn in turns(image, "decode") for row in live(turn, 0)}
    assert 3 in lengths
    assert lengths & {1, 2}


def test_expected_values_are_finite_where_they_count_and_state_is_nan_where_nothing_was_written(image):
    for turn in image.script.turns:
        for told in filter(None, turn.expected):
            for logits, valid in zip(told.logits, told.valid, strict=True):
                assert bool(torch.isfinite(logits[:valid]).all())
                assert float(logits[:valid].std()) > 0.1
    for group in range(3):
        for leaf, first, last in zip(image.script.leaves, image.script.first[group], image.script.last[group], strict=True):
            assert bool(torch.isnan(first).all())
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
    first = image.script.turns[0].inputs[0]
    row = live(image.script.turns[0], 0)[0]
    assert int(first["starts"][row]) > 0
    slot, page = int(first["read_slots"][row]), int(first["page_table"][row, 0])
    for leaf, pool in zip(image.script.leaves, image.script.first[0], strict=True):
        held = pool[page, : int(first["starts"][row])] if leaf.aval.axes[0] == "pages" else pool[slot]
        assert bool(torch.isfinite(held).all())
        assert bool(torch.isnan(pool).any())


def test_a_seed_gives_the_same_script_and_another_one_another(image):
    def again(seed):
        return rehearse(image.small, image.checkpoint, 1, torch.Generator().manual_seed(seed))

    one, same, other = again(1), again(1), again(2)
    assert all(torch.equal(a.inputs[0]["tokens"], b.inputs[0]["tokens"]) for a, b in zip(one.turns, same.turns, strict=True))
    assert not torch.equal(one.turns[0].inputs[0]["tokens"], other.turns[0].inputs[0]["tokens"])
