"""tools/prove/emulated_run.py: right graphs agree with the trace; wrong ones are refused by rank, step and measurement."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from support import small_images as images

from npucompile.graphs.errors import VerifyError
from npucompile.graphs.ops.packed_latents import packed, packed_axis, packed_width, unpacked
from npucompile.graphs.types import Aval, Leaf, Rules
from npucompile.models.request_slots import START, TOKENS
from npucompile.tools.agreement.pools import request_slot_pool
from npucompile.tools.agreement.tolerances import QUANTISED_LATENTS, AllowedDifferences
from npucompile.tools.prove import emulated_run
from npucompile.tools.prove.emulated_run import RankOutputs, Ranks, check_against_trace, check_identical, held

F32 = torch.float32
STRICT = AllowedDifferences(typical=1e-5, rounding=1e-5, worst=1e-4, state=1e-4)
MESH, BOTH = "dp=2,tp=2", ("prefill", "decode")


@pytest.fixture(scope="module")
def ranks():
    return images.image(MESH, BOTH).ranks


@pytest.fixture(scope="module")
def outputs(ranks):
    return ranks.run(images.eager(MESH, BOTH))


def changed(outputs, number, rank, **values):
    """The outputs with some of one rank in one step replaced."""
    steps = {i: [dict(rank_outputs) for rank_outputs in step] for i, step in outputs.steps.items()}
    steps[number][rank] |= values
    return replace(outputs, steps={i: tuple(step) for i, step in steps.items()})


def decode_step(ranks, group=0):
    """The first decode step in which a group has live rows."""
    return next(i for i, step in enumerate(ranks.trace.steps) if step.case.form.kind == "decode" and step.expected[group])


def test_ranks_agree_with_one_device(ranks, outputs):
    measured = check_against_trace(ranks, outputs, STRICT, "eager")
    assert measured["logits_error"] < 1e-4
    assert 0 < measured["typical_error"] < 1e-5
    assert measured["tokens"] + measured["token_mismatches"] >= measured["rows"] - 2
    live = sum(sum(expected.valid) for step in ranks.trace.steps for expected in step.expected if expected)
    assert measured["rows"] == 2 * live
    drafted = 2 * sum(2 * len(expected.rows) for step in ranks.trace.steps for expected in step.expected if expected)
    assert measured["drafts"] + measured["draft_mismatches"] >= 0.9 * drafted
    assert measured["draft_mismatches"] == 0


def test_one_wrong_logit_is_refused_by_step_and_rank(ranks, outputs):
    number = decode_step(ranks)
    row = ranks.trace.steps[number].expected[0].rows[0]
    for value in (50.0, float("nan")):
        logits = outputs.steps[number][1]["logits"].clone()
        logits[row, 0, 7] = value
        with pytest.raises(
            VerifyError, match=rf"eager, rank 1 \(dp 0, tp 1\), step {number} \(decode-b4-q3\): logits differ by \S+ from one"
        ):
            check_against_trace(ranks, changed(outputs, number, 1, logits=logits), STRICT, "eager")


def test_padding_and_invalid_candidates_may_hold_anything(ranks, outputs):
    for number, step in enumerate(ranks.trace.steps):
        for rank in range(4):
            if (expected := step.expected[rank // 2]) is None:
                continue
            logits, tokens = (outputs.steps[number][rank][name].clone() for name in ("logits", "tokens"))
            dead = torch.ones(tokens.shape, dtype=torch.bool)
            for row, valid in zip(expected.rows, expected.valid, strict=True):
                dead[row, :valid] = False
            logits[dead], tokens[dead] = float("nan"), -1
            outputs = changed(outputs, number, rank, logits=logits, tokens=tokens)
    check_against_trace(ranks, outputs, STRICT, "eager")


def test_a_small_error_everywhere_is_refused_though_no_value_is_far_off(ranks, outputs):
    for number in outputs.steps:
        outputs = changed(outputs, number, 1, logits=outputs.steps[number][1]["logits"] + 4e-5 * 4)
    with pytest.raises(VerifyError, match=r"rank 1 \(dp 0, tp 1\): half of all logits( of prompts)? differ by .* legal is at most 1e-05"):
        check_against_trace(ranks, outputs, replace(STRICT, worst=1e-2), "eager")


def test_a_wrong_token_is_refused_where_logits_are_right(ranks, outputs):
    number = decode_step(ranks)
    expected = ranks.trace.steps[number].expected[0]
    tokens = outputs.steps[number][0]["tokens"].clone()
    tokens[expected.rows[0], 0] += 1
    with pytest.raises(VerifyError, match=rf"rank 0 .*step {number} .*: tokens of rows .* are .*, one device's "):
        check_against_trace(ranks, changed(outputs, number, 0, tokens=tokens), STRICT, "eager")


def test_a_token_is_not_bound_where_the_two_best_logits_are_closer_than_the_tolerance(ranks, outputs):
    number = decode_step(ranks)
    expected = ranks.trace.steps[number].expected[0]
    place = expected.greedy.index(True)
    best = expected.logits[place, 0].topk(2).values
    loose = replace(STRICT, typical=float(best[0] - best[1]))
    measured = check_against_trace(ranks, otherwise(ranks, outputs, number, place), loose, "eager")
    assert measured["token_mismatches"] >= 1


def otherwise(ranks, outputs, number, place):
    """The outputs with another first token in a row of rank 0, and with what follows from it."""
    step = ranks.trace.steps[number]
    row, request_slot = step.expected[0].rows[place], int(step.inputs[0]["request_slots"][step.expected[0].rows[place]])
    tokens, counts, pool = (outputs.steps[number][0][name].clone() for name in ("tokens", "counts", "request_slots"))
    draft = int(step.request_slots[0][request_slot, TOKENS + 1])
    tokens[row, 0] = next(token for token in range(3) if token not in (int(tokens[row, 0]), draft))
    counts[row] = 1
    pool[request_slot, :TOKENS] = torch.tensor([int(step.request_slots[0][request_slot, START]) + 1, 0])
    pool[request_slot, TOKENS] = tokens[row, 0]
    return changed(outputs, number, 0, tokens=tokens, counts=counts, request_slots=pool)


def test_a_wrong_draft_is_refused(ranks, outputs):
    for kind in ("prefill", "decode"):
        number = next(i for i, step in enumerate(ranks.trace.steps) if step.case.form.kind == kind and step.expected[0])
        step = ranks.trace.steps[number]
        row = step.expected[0].rows[0]
        drafts, pool = (outputs.steps[number][0][name].clone() for name in ("drafts", "request_slots"))
        drafts[row, 1] = (drafts[row, 1] + 1) % 256
        pool[step.inputs[0]["request_slots"][row], TOKENS + 2] = drafts[row, 1]
        wrong = changed(outputs, number, 0, drafts=drafts, request_slots=pool)
        # Where a draft head's own choices may turn, some drafts may differ, and no more.
        for share in (0.0, 1e-6):
            with pytest.raises(VerifyError, match=rf"eager, rank 0 .*step {number} .*: drafts of rows .* are .*, one device's "):
                check_against_trace(ranks, wrong, replace(STRICT, drafts=share), "eager")
        right, some = (check_against_trace(ranks, each, replace(STRICT, drafts=0.1), "eager") for each in (outputs, wrong))
        assert some["draft_mismatches"] == right["draft_mismatches"] + 1


def test_a_draft_head_that_reads_other_pages_is_refused_even_where_rounding_turns_some_drafts(ranks, monkeypatch):
    run_step, key = Ranks._run_step, f"{ranks.small.model.family.draft_key}."

    def of_other_pages(self, graphs, number, state):
        for pools in state:
            for leaf, pool in zip(self.leaves, pools, strict=True):
                if leaf.path.startswith(key):
                    pool.copy_(pool.roll(1, 0))
        return run_step(self, graphs, number, state)

    monkeypatch.setattr(Ranks, "_run_step", of_other_pages)
    monkeypatch.setattr(emulated_run, "_check_state", lambda *_: 0.0)
    with pytest.raises(VerifyError, match="drafts of rows"):
        check_against_trace(ranks, ranks.run(images.eager(MESH, BOTH)), QUANTISED_LATENTS, "eager")


def test_a_pool_of_bytes_of_another_computing_dtype_holds_the_same_floats():
    generator = torch.Generator().manual_seed(0)
    latents, rotary = (torch.randn(4, 8, 1, width, generator=generator) for width in (32, 8))
    shape = (4, 8, 1, packed_width(32, 8, torch.bfloat16))
    leaf = Leaf("state.layers.0.packed", Aval(shape, torch.int8, ("pages", None, None, packed_axis(32, torch.bfloat16))))
    pool = held(leaf, packed(latents, rotary))
    assert pool.shape == shape
    assert torch.equal(unpacked(pool, 32, torch.bfloat16)[1], rotary.bfloat16())
    assert held(leaf, pool) is pool


def test_a_count_or_a_request_slot_that_does_not_follow_is_refused(ranks, outputs):
    number = decode_step(ranks)
    row = ranks.trace.steps[number].expected[0].rows[0]
    counts = outputs.steps[number][0]["counts"].clone()
    counts[row] += 1
    with pytest.raises(VerifyError, match=rf"eager, rank 0 .*step {number} .*: counts are "):
        check_against_trace(ranks, changed(outputs, number, 0, counts=counts), STRICT, "eager")
    idle = next(i for i, step in enumerate(ranks.trace.steps) if step.expected[1] is None)
    pool = outputs.steps[idle][2]["request_slots"].clone()
    pool[-1, 0] += 1
    with pytest.raises(VerifyError, match=rf"eager, rank 2 .*step {idle} .*: request slot {len(pool) - 1} holds "):
        check_against_trace(ranks, changed(outputs, idle, 2, request_slots=pool), STRICT, "eager")


def spoiling(ranks, number, spoil):
    """Graphs whose pools and results of rank 0 are spoiled behind one step."""
    played = []

    def wrapped(run, signature):
        def call(operands):
            results = run(operands)
            if len(played) == number:
                first = len(signature.params)
                spoil(operands[0][first : first + len(ranks.leaves)], results[0], [leaf.name for leaf in signature.outputs])
            played.append(None)
            return results

        return call, signature

    return {case: wrapped(*graph) for case, graph in images.eager(MESH, BOTH).items()}


def at(ranks, number, place):
    """Row, pages and offsets of the tokens that a live row of group 0 writes."""
    step = ranks.trace.steps[number]
    row = step.expected[0].rows[place]
    where = int(step.request_slots[0][step.inputs[0]["request_slots"][row], START]) + torch.arange(step.expected[0].taken[place])
    return row, step.inputs[0]["page_table"][row, where // 128], where % 128


def test_every_step_is_given_the_request_slots_of_the_trace(ranks, outputs):
    number = decode_step(ranks)

    def spoil(pools, results, names):
        pools[request_slot_pool(ranks.leaves)].fill_(3)

    spoilt = ranks.run(spoiling(ranks, number, spoil))
    assert spoilt.steps[number][0]["request_slots"].unique().tolist() == [3]
    for later in range(number + 1, len(ranks.trace.steps)):
        assert torch.equal(spoilt.steps[later][0]["tokens"], outputs.steps[later][0]["tokens"])
    with pytest.raises(VerifyError, match=rf"rank 0 .*step {number} .*: request slot 0 holds \[3, 3, 3, 3, 3\]"):
        check_against_trace(ranks, spoilt, STRICT, "eager")


@pytest.mark.parametrize("another", [True, False])
def test_what_a_draft_head_cached_of_a_row_that_may_sample_another_token_is_not_compared(ranks, another):
    """Of a row that had to sample its token it is. The next step starts from the trace either way."""
    number = decode_step(ranks)
    place = next(i for i, taken in enumerate(ranks.trace.steps[number].expected[0].taken) if taken > 1)
    row, pages, offsets = at(ranks, number, place)
    names = [leaf.name for leaf in ranks.leaves]

    def spoil(pools, results, outputs):
        pools[names.index("state.mtp.k")][pages, offsets] += 1.0
        if another:
            results[outputs.index("outputs.tokens")][row, 0] += 1

    spoilt = ranks.run(spoiling(ranks, number, spoil))
    with nullcontext() if another else pytest.raises(VerifyError, match=rf"rank 0, step {number} .*: state\.mtp\.k differ by"):
        emulated_run._check_state(ranks, spoilt, number, 0, STRICT, "rank 0")
    emulated_run._check_state(ranks, spoilt, number + 1, 0, STRICT, "rank 0")


def test_wrong_state_is_refused_by_its_pool(ranks, outputs):
    number = decode_step(ranks, group=1)
    step, names = ranks.trace.steps[number], [leaf.name for leaf in ranks.leaves]

    def spoiled(rank, name, change):
        after = [[pool.clone() for pool in pools] for pools in outputs.after[number]]
        change(after[rank][names.index(name)])
        return replace(outputs, after={**outputs.after, number: tuple(after)})

    wrong = spoiled(3, "state.layers.3.v", lambda pool: pool[step.rows[1][0].pages[0], 0].add_(1.0))
    with pytest.raises(VerifyError, match=rf"eager, rank 3 \(dp 1, tp 1\), step {number} .*: state.layers.3.v differ by"):
        check_against_trace(ranks, wrong, STRICT, "eager")
    slots = [slot for row in step.rows[0] for slot in row.slots]
    wrong = spoiled(0, "state.layers.1.delta", lambda pool: pool.index_copy_(0, torch.tensor(slots), pool[slots] * 1.0005))
    with pytest.raises(VerifyError, match=r"rank 0 .*: half of state.layers.1.delta differ by"):
        check_against_trace(ranks, wrong, replace(STRICT, state=1e-2), "eager")


def test_experts_of_another_rank_are_found_even_by_the_widest_tolerance(ranks, monkeypatch):
    image = images.image(MESH, BOTH)
    right = Rules.local_slice
    monkeypatch.setattr(
        Rules, "local_slice", lambda rules, aval, mesh, rank: right(rules, aval, mesh, (rank + 1) % 4 if "experts" in aval.axes else rank)
    )
    wrong = Ranks.of(image.small, image.trace, image.checkpoint, F32)
    monkeypatch.undo()
    with pytest.raises(VerifyError, match=r"logits differ|half of all logits"):
        check_against_trace(ranks, wrong.run(images.eager(MESH, BOTH)), QUANTISED_LATENTS, "experts")


def test_the_smallest_difference_between_two_graphs_is_refused(ranks, outputs):
    number = decode_step(ranks)
    part = RankOutputs(
        {number: outputs.steps[number]}, {number: tuple([pool.clone() for pool in pools] for pools in outputs.after[number])}
    )
    check_identical(ranks, outputs, part, "same")
    slot = ranks.trace.steps[number].rows[0][0].slots[0]
    index = next(i for i, leaf in enumerate(ranks.leaves) if leaf.name.endswith("layers.2.delta"))
    part.after[number][1][index][slot, 0, 0, 0] += 1e-6
    with pytest.raises(
        VerifyError, match=rf"same, rank 1 .*, step {number} \(decode-b4-q3\): state.layers.2.delta differs by \S+ or in what"
    ):
        check_identical(ranks, outputs, part, "same")
    expected = ranks.trace.steps[number].expected[0]
    tokens = outputs.steps[number][0]["tokens"].clone()
    tokens[expected.rows[0], 0] += 1
    with pytest.raises(VerifyError, match=rf"same, rank 0 .*, step {number} .*: tokens of rows"):
        check_identical(ranks, outputs, changed(part, number, 0, tokens=tokens), "same")


def test_a_group_with_one_result_is_judged_with_the_others():
    ranks = images.image(MESH, ("prefill",)).ranks
    outputs = ranks.run(images.eager(MESH, ("prefill",)))
    (number,) = (i for i, step in enumerate(ranks.trace.steps) if step.expected[1])
    expected = ranks.trace.steps[number].expected[1]

    def off_by(share):
        logits = outputs.steps[number][2]["logits"].clone()
        logits[expected.rows[0], 0] += share * float(expected.logits.abs().max())
        return changed(outputs, number, 2, logits=logits)

    assert check_against_trace(ranks, off_by(5e-5), STRICT, "eager")["logits_error"] > STRICT.typical
    with pytest.raises(VerifyError, match=r"rank 2 \(dp 1, tp 0\), step \d+ .*: logits differ"):
        check_against_trace(ranks, off_by(1.0), STRICT, "eager")
