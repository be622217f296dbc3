"""Programs of buckets against transformers: chunked prefill, decode, verification and rollback, with everything else NaN."""

from __future__ import annotations

import pickle

import pytest
import torch

from npucompile.graphs import tree
from npucompile.graphs.types import Bucket
from npucompile.models import step
from npucompile.models.presets import BUNDLED

CASES = ["dense", "dense-tied", "dense-equal-heads", "moe", "moe-tied", "moe-one-expert"]
TOLERANCE = 1e-4
ALONE_TOLERANCE = 1e-5


def decode(batch: int, q_len: int = 1) -> Bucket:
    return Bucket("decode", batch, q_len)


@pytest.mark.parametrize("name", [*CASES, *BUNDLED])
@torch.no_grad()
def test_64_greedy_tokens_equal_transformers(oracle, name):
    """Prompt in three chunks, the last padded; 64 decode steps. Every step's logits and choice against one pass over all tokens."""
    random = oracle.named(name)
    runner, ids, pages = oracle.Runner(random.model, random.weights), random.prompt(37), list(range(20, 35))
    said = [runner.prefill(ids, pages, 5, [16, 16, 16])]
    answer = [int(said[0].argmax())]
    while len(answer) < 64:
        tokens, logits = runner.step(decode(1), [oracle.Row(answer[-1:], len(ids) + len(answer) - 1, pages, 5, [5])])
        said.append(logits[0, 0])
        answer.append(int(tokens[0, 0]))
    theirs = random.logits([*ids, *answer[:-1]])[len(ids) - 1 :]
    assert (torch.stack(said) - theirs).abs().max() < TOLERANCE
    assert answer == theirs.argmax(-1).tolist()


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_decode_equals_transformers_with_its_cache(oracle, name):
    random = oracle.case(name)
    runner, ids, pages = oracle.Runner(random.model, random.weights), random.prompt(30), [7, 3, 1, 9]
    said = [runner.prefill(ids[:19], pages, 2, [8, 8, 4])]
    for at in range(19, 30):
        # The state moves to another slot at every step, as it does under speculation.
        _, logits = runner.step(decode(1), [oracle.Row([ids[at]], at, pages, 2 + (at - 19) % 3, [2 + (at - 18) % 3])])
        said.append(logits[0, 0])
    theirs = random.logits_step_by_step(ids, 19)
    assert (torch.stack(said) - theirs).abs().max() < TOLERANCE


@pytest.mark.parametrize("chunks", [[64], [33], [5, 32], [32, 5], [1, 2, 3, 4, 5, 6, 7, 8], [40, 1]], ids=str)
@pytest.mark.parametrize("name", ["dense", "moe"])
@torch.no_grad()
def test_the_cut_of_a_prompt_changes_nothing(oracle, name, chunks):
    """Whatever the chunk sizes (one token, odd, larger than the prompt): the same logits, and the same state for the next token."""
    random = oracle.case(name)
    ids = random.prompt(33)
    ids = ids[: min(33, sum(chunks))]
    runner, pages = oracle.Runner(random.model, random.weights), [6, 5, 4, 3, 2]
    if chunks == [40, 1]:
        ids = random.prompt(41)
        pages = [*pages, 1]
    logits = runner.prefill(ids, pages, 1, chunks)
    _, after = runner.step(decode(1), [oracle.Row([17], len(ids), pages, 1, [2])])
    theirs = random.logits([*ids, 17])
    assert (logits - theirs[-2]).abs().max() < TOLERANCE
    assert (after[0, 0] - theirs[-1]).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", ["dense", "dense-tied", "moe", "moe-tied"])
@torch.no_grad()
def test_several_candidates_in_one_step_and_rollback(oracle, name):
    """Three candidates a row; then each row goes on from the slot after its last accepted one, as if the rest had not been."""
    random = oracle.case(name)
    runner = oracle.Runner(random.model, random.weights)
    prompts, pages = [random.prompt(9, 1), random.prompt(14, 2)], [[3, 8, 5], [2, 9, 6]]
    slots = [[1, 2, 3], [4, 5, 6]]
    for ids, table, own in zip(prompts, pages, slots, strict=True):
        runner.prefill(ids, table, own[0], [16])
    drafts = [random.prompt(3, 3), random.prompt(3, 4)]
    rows = [oracle.Row(drafts[b], len(prompts[b]), pages[b], slots[b][0], slots[b]) for b in range(2)]
    _, logits = runner.step(decode(4, 3), rows)
    accepted = [1, 2]
    for b in range(2):
        theirs = random.logits([*prompts[b], *drafts[b]])[-3:]
        assert (logits[b] - theirs).abs().max() < TOLERANCE
    kept = [[*prompts[b], *drafts[b][: accepted[b]]] for b in range(2)]
    following = [random.prompt(3, 5), random.prompt(3, 6)]
    rows = [oracle.Row(following[b], len(kept[b]), pages[b], slots[b][accepted[b] - 1], slots[b]) for b in range(2)]
    _, logits = runner.step(decode(2, 3), rows)
    for b in range(2):
        assert (logits[b] - random.logits([*kept[b], *following[b]])[-3:]).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", ["dense", "dense-equal-heads", "moe", "moe-one-expert"])
@pytest.mark.parametrize("batch", [3, 4, 8])
@torch.no_grad()
def test_poison_around_live_rows_changes_nothing(oracle, name, batch):
    """Rows of other lengths, NaN padding rows, NaN pools and the embedding of the padding token NaN: each row as if it were alone."""
    random = oracle.case(name)
    poisoned = dict(random.weights)
    poisoned["embed"] = random.weights["embed"].clone()
    poisoned["embed"][0] = float("nan")
    prompts = [random.prompt(21, 1), random.prompt(6, 2), random.prompt(1, 3)]
    pages = [[11, 2, 30, 4, 1], [5, 9], [8, 7]]
    crowd = oracle.Runner(random.model, poisoned)
    alone = [oracle.Runner(random.model, random.weights) for _ in prompts]
    slots = [4, 9, 12]
    last = []
    for ids, table, slot, runner in zip(prompts, pages, slots, alone, strict=True):
        together = crowd.prefill(ids, table, slot, [16, 16] if len(ids) > 16 else [16])
        single = runner.prefill(ids, table, slot, [len(ids)])
        assert (together - single).abs().max() < ALONE_TOLERANCE
        last.append(int(single.argmax()) or 1)
    for at in range(6):
        rows = [oracle.Row([last[b]], len(prompts[b]) + at, pages[b], slots[b], [slots[b]]) for b in range(3)]
        tokens, logits = crowd.step(decode(batch), rows)
        for b, runner in enumerate(alone):
            token, single = runner.step(decode(1), [rows[b]])
            assert (logits[b] - single[0]).abs().max() < ALONE_TOLERANCE
            assert int(tokens[b, 0]) == int(token[0, 0])
            last[b] = int(token[0, 0]) or 1


@torch.no_grad()
def test_padding_writes_nowhere_but_to_the_null_page_and_slot(oracle):
    random = oracle.case("dense")
    runner = oracle.Runner(random.model, random.weights)
    runner.prefill(random.prompt(5), [3], 2, [16])
    runner.step(decode(4), [])
    for path, pool in tree.flatten(runner.state):
        own = 3 if path.endswith((".k", ".v")) else 2
        written = [i for i in range(1, len(pool)) if not pool[i].isnan().all()]
        assert written == [own], path
    keys = runner.state["layers"][3]["k"][3]
    assert not keys[:5].isnan().any()
    assert keys[5:].isnan().all()


@torch.no_grad()
def test_a_recycled_slot_and_page_forget_their_former_owner(oracle):
    random = oracle.case("moe")
    runner, ids = oracle.Runner(random.model, random.weights), random.prompt(11, 2)
    runner.prefill(random.prompt(16, 1), [3, 4], 2, [16])
    assert (runner.prefill(ids, [4, 3], 2, [16]) - random.logits(ids)[-1]).abs().max() < TOLERANCE


def test_programs_declare_what_they_take_and_give(oracle):
    """The abstract trees equal what runs: outputs [B, W] and [B, W, V], new state of the structure and shapes of the old."""
    random = oracle.case("moe")
    for bucket, W in ((Bucket("prefill", 1, 32), 1), (decode(2), 1), (decode(2, 3), 3)):
        program = step.program(random.model, bucket, oracle.LIMITS, torch.float32)
        assert program.name == f"random/{bucket.name}"
        assert {path: aval.shape for path, aval in tree.flatten(program.inputs)} == {
            path: tuple(t.shape) for path, t in tree.flatten(oracle.inputs(bucket, []))
        }
        weights = {key: random.weights[key] for key in program.params}
        outputs, state = program.forward(weights, oracle.poisoned(program.state), oracle.inputs(bucket, []))
        assert tuple(outputs["tokens"].shape) == (bucket.batch, W)
        assert tuple(outputs["logits"].shape) == (bucket.batch, W, 97)
        assert (outputs["tokens"].dtype, outputs["logits"].dtype) == (torch.int32, torch.float32)
        assert [(p, tuple(t.shape), t.dtype) for p, t in tree.flatten(state)] == [
            (p, aval.shape, aval.dtype) for p, aval in tree.flatten(program.state)
        ]


def test_the_draft_head_is_left_out_of_programs(oracle):
    values = {**oracle.CASES["moe"], "mtp_num_hidden_layers": 1}
    model = step.Model("x", oracle.case("moe").model.family, oracle.qwen3_5.Config.from_hf(values))
    assert "mtp" in model.family.abstract_params(model.config, torch.float32)
    assert "mtp" not in model.params(torch.float32)
    assert "mtp" not in model.state(oracle.LIMITS, torch.float32)


def test_a_model_crosses_to_other_processes_by_the_name_of_its_family(oracle):
    model = oracle.case("moe").model
    again = pickle.loads(pickle.dumps(model))
    assert again == model
    assert again.family is model.family


@torch.no_grad()
def test_without_logits_the_tokens_are_the_same(oracle):
    random = oracle.case("moe")
    for bucket in (Bucket("prefill", 1, 32), decode(2, 3)):
        given = oracle.inputs(bucket, [oracle.Row(random.prompt(bucket.q_len), 0, [1, 2, 3, 4], 1, [1])])
        said = []
        for emit in (True, False):
            program = step.program(random.model, bucket, oracle.LIMITS, torch.float32, emit_logits=emit)
            weights = {key: random.weights[key] for key in program.params}
            said.append(program.forward(weights, oracle.poisoned(program.state), given)[0])
        assert sorted(said[0]) == ["logits", "tokens"]
        assert sorted(said[1]) == ["tokens"]
        assert torch.equal(said[0]["tokens"][:1], said[1]["tokens"][:1])
