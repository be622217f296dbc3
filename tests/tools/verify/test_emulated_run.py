"""tools/verify/emulated_run.py: right graphs agree with the script, wrong ones are told by rank, step and measure."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support import small_images as images

from npucompile.graphs.errors import VerifyError
from npucompile.graphs.types import Rules
from npucompile.models.request_slots import START, TOKENS
from npucompile.tools.verify import emulated_run
from npucompile.tools.verify.emulated_run import Allowed, Cast, Heard, against_each_other, against_script
from npucompile.tools.verify.step_trace import seat_pool

F32 = torch.float32
STRICT = Allowed(typical=1e-5, worst=1e-4, state=1e-4)
MESH, BOTH = "dp=2,tp=2", ("prefill", "decode")


@pytest.fixture(scope="module")
def cast():
    return images.image(MESH, BOTH).cast


@pytest.fixture(scope="module")
def heard(cast):
    return cast.replay(images.eager(MESH, BOTH), keep=range(len(cast.script.turns)))


def changed(heard, number, rank, **outputs):
    """What was heard, with other outputs of one rank in one turn."""
    turns = {i: [dict(one) for one in turn] for i, turn in heard.turns.items()}
    turns[number][rank] |= outputs
    return replace(heard, turns={i: tuple(turn) for i, turn in turns.items()})


def decode_turn(cast, group=0):
    """A decode turn in which a group works."""
    return next(i for i, turn in enumerate(cast.script.turns) if turn.case.form.kind == "decode" and turn.expected[group])


def test_ranks_agree_with_one_device(cast, heard):
    told = against_script(cast, heard, STRICT, "eager")
    assert told["logits_error"] < 1e-4
    assert 0 < told["typical_error"] < 1e-5
    assert told["tokens"] + told["token_mismatches"] >= told["rows"] - 2
    live = sum(sum(one.valid) for turn in cast.script.turns for one in turn.expected if one)
    assert told["rows"] == 2 * live
    drafted = 2 * sum(2 * len(one.rows) for turn in cast.script.turns for one in turn.expected if one)
    assert told["drafts"] + told["draft_mismatches"] >= 0.9 * drafted
    assert told["draft_mismatches"] == 0


def test_one_wrong_logit_is_told_by_step_and_rank(cast, heard):
    number = decode_turn(cast)
    row = cast.script.turns[number].expected[0].rows[0]
    for value in (50.0, float("nan")):
        logits = heard.turns[number][1]["logits"].clone()
        logits[row, 0, 7] = value
        with pytest.raises(
            VerifyError, match=rf"eager, rank 1 \(dp 0, tp 1\), step {number} \(decode-b4-q3\): logits differ by \S+ from one"
        ):
            against_script(cast, changed(heard, number, 1, logits=logits), STRICT, "eager")


def test_padding_and_invalid_candidates_may_hold_anything(cast, heard):
    for number, turn in enumerate(cast.script.turns):
        for rank in range(4):
            if (told := turn.expected[rank // 2]) is None:
                continue
            logits, tokens = (heard.turns[number][rank][name].clone() for name in ("logits", "tokens"))
            dead = torch.ones(tokens.shape, dtype=torch.bool)
            for row, valid in zip(told.rows, told.valid, strict=True):
                dead[row, :valid] = False
            logits[dead], tokens[dead] = float("nan"), -1
            heard = changed(heard, number, rank, logits=logits, tokens=tokens)
    against_script(cast, heard, STRICT, "eager")


def test_a_small_error_everywhere_is_refused_though_no_value_is_far_off(cast, heard):
    for number in heard.turns:
        heard = changed(heard, number, 2, logits=heard.turns[number][2]["logits"] + 4e-5 * 4)
    with pytest.raises(VerifyError, match=r"rank 2 \(dp 1, tp 0\): half of all logits differ by .* legal is at most 1e-05"):
        against_script(cast, heard, replace(STRICT, worst=1e-2), "eager")


def test_a_wrong_token_is_refused_where_logits_are_right(cast, heard):
    number = decode_turn(cast)
    told = cast.script.turns[number].expected[0]
    tokens = heard.turns[number][0]["tokens"].clone()
    tokens[told.rows[0], 0] += 1
    with pytest.raises(VerifyError, match=rf"rank 0 .*step {number} .*: tokens of rows .* are .*, one device's "):
        against_script(cast, changed(heard, number, 0, tokens=tokens), STRICT, "eager")


def test_a_token_is_not_bound_where_the_two_best_logits_are_closer_than_the_tolerance(cast, heard):
    number = decode_turn(cast)
    told = cast.script.turns[number].expected[0]
    place = told.greedy.index(True)
    best = told.logits[place, 0].topk(2).values
    loose = replace(STRICT, typical=float(best[0] - best[1]))
    found = against_script(cast, otherwise(cast, heard, number, place), loose, "eager")
    assert found["token_mismatches"] >= 1


def otherwise(cast, heard, number, place):
    """What was heard, but that rank 0 takes another first token in a row, and all that follows from it."""
    turn = cast.script.turns[number]
    row, seat = turn.expected[0].rows[place], int(turn.inputs[0]["seats"][turn.expected[0].rows[place]])
    tokens, counts, pool = (heard.turns[number][0][name].clone() for name in ("tokens", "counts", "seats"))
    draft = int(turn.seats[0][seat, TOKENS + 1])
    tokens[row, 0] = next(token for token in range(3) if token not in (int(tokens[row, 0]), draft))
    counts[row] = 1
    pool[seat, :TOKENS] = torch.tensor([int(turn.seats[0][seat, START]) + 1, 0])
    pool[seat, TOKENS] = tokens[row, 0]
    return changed(heard, number, 0, tokens=tokens, counts=counts, seats=pool)


def test_a_wrong_draft_is_refused(cast, heard):
    for kind in ("prefill", "decode"):
        number = next(i for i, turn in enumerate(cast.script.turns) if turn.case.form.kind == kind and turn.expected[0])
        turn = cast.script.turns[number]
        row = turn.expected[0].rows[0]
        drafts, pool = (heard.turns[number][0][name].clone() for name in ("drafts", "seats"))
        drafts[row, 1] = (drafts[row, 1] + 1) % 256
        pool[turn.inputs[0]["seats"][row], TOKENS + 2] = drafts[row, 1]
        with pytest.raises(VerifyError, match=rf"eager, rank 0 .*step {number} .*: drafts of rows .* are .*, one device's "):
            against_script(cast, changed(heard, number, 0, drafts=drafts, seats=pool), STRICT, "eager")


def test_a_count_or_a_seat_that_does_not_follow_is_refused(cast, heard):
    number = decode_turn(cast)
    row = cast.script.turns[number].expected[0].rows[0]
    counts = heard.turns[number][0]["counts"].clone()
    counts[row] += 1
    with pytest.raises(VerifyError, match=rf"eager, rank 0 .*step {number} .*: counts are "):
        against_script(cast, changed(heard, number, 0, counts=counts), STRICT, "eager")
    idle = next(i for i, turn in enumerate(cast.script.turns) if turn.expected[1] is None)
    pool = heard.turns[idle][2]["seats"].clone()
    pool[-1, 0] += 1
    with pytest.raises(VerifyError, match=rf"eager, rank 2 .*step {idle} .*: seat {len(pool) - 1} holds "):
        against_script(cast, changed(heard, idle, 2, seats=pool), STRICT, "eager")


def spoiling(cast, number, spoil):
    """Graphs whose pools and results of rank 0 are spoiled behind one turn."""
    played = []

    def wrapped(run, signature):
        def call(operands):
            results = run(operands)
            if len(played) == number:
                first = len(signature.params)
                spoil(operands[0][first : first + len(cast.leaves)], results[0], [leaf.name for leaf in signature.outputs])
            played.append(None)
            return results

        return call, signature

    return {case: wrapped(*one) for case, one in images.eager(MESH, BOTH).items()}


def at(cast, number, place):
    """Row, pages and offsets of what a live row of group 0 takes in."""
    turn = cast.script.turns[number]
    row = turn.expected[0].rows[place]
    where = int(turn.seats[0][turn.inputs[0]["seats"][row], START]) + torch.arange(turn.expected[0].taken[place])
    return row, turn.inputs[0]["page_table"][row, where // 128], where % 128


def test_every_step_is_given_the_seats_of_the_script(cast, heard):
    number = decode_turn(cast)

    def spoil(pools, results, names):
        pools[seat_pool(cast.leaves)].fill_(3)

    again = cast.replay(spoiling(cast, number, spoil))
    assert again.turns[number][0]["seats"].unique().tolist() == [3]
    for later in range(number + 1, len(cast.script.turns)):
        assert torch.equal(again.turns[later][0]["tokens"], heard.turns[later][0]["tokens"])
    with pytest.raises(VerifyError, match=rf"rank 0 .*step {number} .*: seat 0 holds \[3, 3, 3, 3, 3\]"):
        against_script(cast, again, STRICT, "eager")


@pytest.mark.parametrize("other", [True, False])
def test_a_row_that_may_have_said_another_token_goes_on_with_the_cache_of_the_script(cast, other):
    """What the draft head keeps of the row is put right behind the step; of a row that said what it must it is not."""
    number = decode_turn(cast)
    place = next(i for i, taken in enumerate(cast.script.turns[number].expected[0].taken) if taken > 1)
    row, pages, offsets = at(cast, number, place)
    names = [leaf.name for leaf in cast.leaves]

    def spoil(pools, results, outputs):
        pools[names.index("state.mtp.k")][pages, offsets] += 1.0
        if other:
            results[outputs.index("outputs.tokens")][row, 0] += 1

    again = cast.replay(spoiling(cast, number, spoil), keep=[number])
    right = cast.share(cast.script.last[0], 0)[names.index("state.mtp.k")][pages, offsets]
    found = again.state[0][names.index("state.mtp.k")][pages, offsets]
    assert torch.allclose(found, right, atol=1e-4) == other
    # What is compared bit for bit is what the graph left.
    assert not torch.allclose(again.after[number][0][names.index("state.mtp.k")][pages, offsets], right, atol=1e-4)
    if not other:
        with pytest.raises(VerifyError, match=r"rank 0 .*: (state\.mtp\.k differ by|drafts of rows)"):
            against_script(cast, again, STRICT, "eager")


def test_wrong_state_is_told_by_its_pool(cast, heard):
    spoiled = [[pool.clone() for pool in pools] for pools in heard.state]
    page, _ = cast.script.pages[1][0]
    names = [leaf.name for leaf in cast.leaves]
    spoiled[3][names.index("state.layers.3.v")][page, 0] += 1.0
    with pytest.raises(VerifyError, match=r"eager, rank 3 \(dp 1, tp 1\): state.layers.3.v differ by"):
        against_script(cast, replace(heard, state=tuple(spoiled)), STRICT, "eager")
    spoiled = [[pool.clone() for pool in pools] for pools in heard.state]
    spoiled[0][names.index("state.layers.1.delta")][list(cast.script.slots[0])] *= 1.0005
    with pytest.raises(VerifyError, match=r"rank 0 .*: half of state.layers.1.delta differ by"):
        against_script(cast, replace(heard, state=tuple(spoiled)), replace(STRICT, state=1e-2), "eager")


def test_swapped_parameters_of_two_ranks_are_found(cast):
    swapped = replace(cast, params=(cast.params[1], cast.params[0], *cast.params[2:]))
    with pytest.raises(VerifyError, match=r"rank 0"):
        against_script(cast, swapped.replay(images.eager(MESH, BOTH)), emulated_run.Allowed(2e-2, 0.25, 0.25), "swapped")


def test_experts_of_another_rank_are_found_even_by_the_widest_tolerance(cast, monkeypatch):
    image = images.image(MESH, BOTH)
    right = Rules.local_slice
    monkeypatch.setattr(
        Rules, "local_slice", lambda rules, aval, mesh, rank: right(rules, aval, mesh, (rank + 1) % 4 if "experts" in aval.axes else rank)
    )
    wrong = Cast.of(image.small, image.script, image.checkpoint, F32)
    monkeypatch.undo()
    with pytest.raises(VerifyError, match=r"logits differ|half of all logits"):
        against_script(cast, wrong.replay(images.eager(MESH, BOTH)), Allowed(2e-2, 0.25, 0.25), "experts")


def test_pages_begin_finite_and_slots_nan(cast):
    for rank in range(4):
        for leaf, pool, given in zip(cast.leaves, cast._first(rank), cast.share(cast.script.first[rank // 2], rank), strict=True):
            if leaf.aval.axes[0] == "pages":
                assert bool(torch.isfinite(pool).all())
                assert torch.equal(pool[~torch.isnan(given)], given[~torch.isnan(given)])
            else:
                assert torch.equal(pool.nan_to_num(7.5), given.nan_to_num(7.5))


def test_ranks_of_a_group_hold_copies_of_few_heads():
    image = images.image("tp=4", ("decode",))
    cast, pools = image.cast, image.script.first[0]
    index = next(i for i, leaf in enumerate(cast.leaves) if leaf.name.endswith("3.k"))
    shares = [cast.share(pools, rank)[index] for rank in range(4)]
    assert pools[index].shape[2] == 2
    for rank, share in enumerate(shares):
        torch.testing.assert_close(share, pools[index][:, :, rank // 2][:, :, None], equal_nan=True, rtol=0, atol=0)
    against_script(cast, cast.replay(images.eager("tp=4", ("decode",))), STRICT, "copies")


def test_an_excerpt_is_the_same_turn_again(cast, heard):
    chosen = {number: heard.before[number] for number in (0, decode_turn(cast))}
    kept = [[pool.clone() for pool in pools] for pools in chosen[0]]
    again = cast.excerpt(images.eager(MESH, BOTH), chosen)
    told = against_each_other(cast, heard, again, "twice")
    assert told["turns"] == 2
    assert told["tokens"] > 0
    assert told["values"] > 1e4
    for before, pools in zip(kept, chosen[0], strict=True):
        for a, b in zip(before, pools, strict=True):
            torch.testing.assert_close(a, b, equal_nan=True, rtol=0, atol=0)


def test_logits_in_shares_give_the_same_tokens(cast, heard):
    shared = cast.excerpt(images.eager(MESH, BOTH, emit_logits=False), heard.before)
    assert "logits" not in shared.turns[0][0]
    against_each_other(cast, heard, shared, "shares")


def test_the_smallest_difference_between_two_graphs_is_told(cast, heard):
    number = decode_turn(cast)
    part = Heard({number: heard.turns[number]}, (), {}, {number: tuple([pool.clone() for pool in pools] for pools in heard.after[number])})
    against_each_other(cast, heard, part, "same")
    slot = cast.script.slots[0][0]
    index = next(i for i, leaf in enumerate(cast.leaves) if leaf.name.endswith("layers.2.delta"))
    part.after[number][1][index][slot, 0, 0, 0] += 1e-6
    with pytest.raises(
        VerifyError, match=rf"same, rank 1 .*, step {number} \(decode-b4-q3\): state.layers.2.delta differs by \S+ or in what"
    ):
        against_each_other(cast, heard, part, "same")
    told = cast.script.turns[number].expected[0]
    tokens = heard.turns[number][0]["tokens"].clone()
    tokens[told.rows[0], 0] += 1
    with pytest.raises(VerifyError, match=rf"same, rank 0 .*, step {number} .*: tokens of rows"):
        against_each_other(cast, heard, changed(part, number, 0, tokens=tokens), "same")
