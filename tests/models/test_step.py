"""models/step.py: programs of buckets equal transformers in prefill, decode, verification and rollback, with all else NaN."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch
from support import oracle, speculators

from npucompile.graphs import tree
from npucompile.graphs.errors import SpecError
from npucompile.graphs.steps.score import SCORE
from npucompile.graphs.steps.table import StepInputs, kind_of
from npucompile.graphs.types import Bucket
from npucompile.models import step
from npucompile.models.presets import BUNDLED

CASES = oracle.DRAFTING
TOLERANCE = 1e-4
SINGLE_TOLERANCE = 1e-5


def decode(batch: int, q_len: int = 1) -> Bucket:
    return Bucket("decode", batch, q_len)


@pytest.mark.parametrize("name", [*oracle.CASES, *BUNDLED])
@torch.no_grad()
def test_64_greedy_tokens_equal_transformers(name):
    """A prompt in three chunks, the last padded, and 64 decode steps, against one pass of transformers over all tokens."""
    random = oracle.named(name)
    runner, ids, pages = oracle.Runner(random.model, random.weights), random.prompt(37), list(range(20, 35))
    logits = [runner.prefill(ids, pages, 5, [16, 16, 16])]
    tokens = [int(logits[0].argmax())]
    while len(tokens) < 64:
        step = runner.step(decode(1), [oracle.Row(tokens[-1:], len(ids) + len(tokens) - 1, pages, 5, [5])])
        logits.append(step["logits"][0, 0])
        tokens.append(int(step["tokens"][0, 0]))
    theirs = random.logits([*ids, *tokens[:-1]])[len(ids) - 1 :]
    assert (torch.stack(logits) - theirs).abs().max() < TOLERANCE
    assert tokens == theirs.argmax(-1).tolist()


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_decode_equals_transformers_with_its_cache(name):
    """One, two and three candidates in turn, all accepted, so that the state moves to another slot in each step."""
    random = oracle.drafting(name)
    runner, ids, pages = oracle.Runner(random.model, random.weights, drafts=2), random.prompt(31), [7, 3, 1, 9]
    rows = [runner.prefill(ids[:19], pages, 2, [8, 8, 4])]
    at, slot = 19, 2
    for count in (1, 2, 3, 1, 3, 2):
        logits = runner.step(decode(1, 3), [oracle.Row(ids[at : at + count], at, pages, slot, [2, 6, 3])])["logits"]
        rows.extend(logits[0, :count])
        at, slot = at + count, [2, 6, 3][count - 1]
    theirs = random.logits_step_by_step(ids, 19)
    assert (torch.stack(rows) - theirs).abs().max() < TOLERANCE


@pytest.mark.parametrize("chunks", [[64], [33], [5, 32], [32, 5], [1, 2, 3, 4, 5, 6, 7, 8], [40, 1]], ids=str)
@pytest.mark.parametrize("name", ["dense", "moe", "plain-moe", "latent", "pairs", "shared-index"])
@torch.no_grad()
def test_the_cut_of_a_prompt_changes_nothing(name, chunks):
    """Chunks of one token, odd ones, and ones larger than the prompt give the same logits and the same state."""
    random = oracle.case(name)
    ids = random.prompt(33)
    ids = ids[: min(33, sum(chunks))]
    runner, pages = oracle.Runner(random.model, random.weights), [6, 5, 4, 3, 2]
    if chunks == [40, 1]:
        ids = random.prompt(41)
        pages = [*pages, 1]
    logits = runner.prefill(ids, pages, 1, chunks)
    following = runner.step(decode(1), [oracle.Row([17], len(ids), pages, 1, [1])])["logits"]
    theirs = random.logits([*ids, 17])
    assert (logits - theirs[-2]).abs().max() < TOLERANCE
    assert (following[0, 0] - theirs[-1]).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    "name", ["dense", "moe-tied", "next", "plain", "plain-moe", "latent", "latent-all-dense", "sparse", "pairs", "shared-index", "biased"]
)
@torch.no_grad()
def test_prompts_of_one_step_get_what_each_gets_alone(name):
    """In chunks, with a row of padding; then a greedy step, with drafts where the model has a head."""
    drafts = 2 if name in CASES else 0
    random = oracle.drafting(name) if drafts else oracle.case(name)

    def served():
        return speculators.Server(random.model, random.weights, drafts, run=speculators.direct, padding=7)

    lengths = {4: 21, 1: 6, 3: 1}
    together, alone = ([speculators.Request(random.prompt(length, slot), slot) for slot, length in lengths.items()] for _ in range(2))
    crowd, singles = served(), [served() for _ in alone]
    outputs = [crowd.prefill(together, [16, 8], batch=4), crowd.decode(together)]
    crowd.expect_untouched(list(lengths))
    for b, (server, request) in enumerate(zip(singles, alone, strict=True)):
        for shared, single in zip(outputs, [server.prefill([request]), server.decode([request])], strict=True):
            assert all(torch.equal(shared[key][b], single[key][0]) for key in ("tokens", "counts", "drafts") if key in single)
            assert (shared["logits"][b] - single["logits"][0]).abs().max() < SINGLE_TOLERANCE
        assert request.output == together[b].output


@pytest.mark.parametrize("name", ["dense", "dense-equal-heads", "moe", "moe-one-expert"])
@pytest.mark.parametrize("batch", [3, 4, 8])
@torch.no_grad()
def test_poison_around_live_rows_changes_nothing(name, batch):
    """Among rows of other lengths, with NaN in pools and in the padding token's embedding, each row is as by itself."""
    random = oracle.case(name)
    poisoned = dict(random.weights)
    poisoned["embed"] = random.weights["embed"].clone()
    poisoned["embed"][0] = float("nan")
    prompts = [random.prompt(21, 1), random.prompt(6, 2), random.prompt(1, 3)]
    pages = [[11, 2, 30, 4, 1], [5, 9], [8, 7]]
    crowd = oracle.Runner(random.model, poisoned)
    runners = [oracle.Runner(random.model, random.weights) for _ in prompts]
    slots = [4, 9, 12]
    last = []
    for ids, table, slot, runner in zip(prompts, pages, slots, runners, strict=True):
        together = crowd.prefill(ids, table, slot, [16, 16] if len(ids) > 16 else [16])
        single = runner.prefill(ids, table, slot, [len(ids)])
        assert (together - single).abs().max() < SINGLE_TOLERANCE
        last.append(int(single.argmax()) or 1)
    for at in range(6):
        rows = [oracle.Row([last[b]], len(prompts[b]) + at, pages[b], slots[b], [slots[b]]) for b in range(3)]
        together = crowd.step(decode(batch), rows)
        for b, runner in enumerate(runners):
            single = runner.step(decode(1), [rows[b]])
            assert (together["logits"][b] - single["logits"][0]).abs().max() < SINGLE_TOLERANCE
            assert int(together["tokens"][b, 0]) == int(single["tokens"][0, 0])
            last[b] = int(single["tokens"][0, 0]) or 1


@pytest.mark.parametrize("drafts", [0, 2])
@torch.no_grad()
def test_padding_writes_nowhere_but_to_the_null_page_and_slot(drafts):
    random = oracle.drafting("dense")
    runner = oracle.Runner(random.model, random.weights, drafts=drafts)
    runner.prefill(random.prompt(5), [3], 2, [16])
    runner.step(decode(4, drafts + 1), [], junk=1)
    state = {name: pools for name, pools in runner.state.items() if name != "request_slots"}
    for path, pool in tree.flatten(state):
        own = 3 if path.endswith((".k", ".v")) else 2
        written = [i for i in range(1, len(pool)) if not pool[i].isnan().all()]
        assert written == [own], path
    keys = runner.state["layers"][3]["k"][3]
    assert not keys[:5].isnan().any()
    assert keys[5:].isnan().all()


@pytest.mark.parametrize("drafts", [0, 2])
@torch.no_grad()
def test_programs_declare_their_inputs_outputs_and_state(drafts):
    """The abstract trees equal what runs: outputs by name and shape, new state of the structure and shapes of the old."""
    random, limits = oracle.drafting("moe"), oracle.limits(drafts)
    for bucket, B, W in ((Bucket("prefill", 1, 32), 1, 1), (decode(2, drafts + 1), 2, drafts + 1), (SCORE.bucket(2, 16), 2, 16)):
        for logits, most in ((True, 0), (False, 0), (True, 5)):
            if bucket.kind == SCORE.name and not most:
                with pytest.raises(SpecError, match=r"score-b2-q16, which gives log probabilities .*; legal is at least 1"):
                    step.program(random.model, bucket, limits, torch.float32, emit_logits=logits, max_logprobs=most)
                continue
            program = step.program(random.model, bucket, limits, torch.float32, emit_logits=logits, max_logprobs=most)
            assert program.name == f"random/{bucket.name}"
            assert program.inputs == StepInputs(bucket, limits, logprobs=most > 0).avals()
            assert ("mtp" in program.params, "mtp" in program.state) == (drafts > 0, drafts > 0)
            weights = {key: random.weights[key] for key in program.params}
            outputs, state = program.forward(weights, oracle.poisoned(program.state), oracle.blank(program))
            declared = {"tokens": ((B, W), torch.int32)}
            if logits:
                declared["logits"] = ((B, W, 97), torch.float32)
            if bucket.kind == "decode":
                declared["counts"] = ((B,), torch.int32)
            if drafts:
                declared["drafts"] = ((B, drafts), torch.int32)
            if most:
                declared |= {"chosen_logprobs": ((B, W), torch.float32), "top_logprobs": ((B, W, most), torch.float32)}
                declared["top_ids"] = ((B, W, most), torch.int32)
            assert {name: (tuple(t.shape), t.dtype) for name, t in outputs.items()} == declared
            read = {output.name: len(output.dims) for output in kind_of(bucket).outputs}
            assert {name: t.dim() for name, t in outputs.items()}.items() <= read.items()
            assert [(p, tuple(t.shape), t.dtype) for p, t in tree.flatten(state)] == [
                (p, aval.shape, aval.dtype) for p, aval in tree.flatten(program.state)
            ]


@pytest.mark.parametrize(("drafts", "q_len"), [(0, 2), (2, 4), (3, 5)])
def test_a_decode_bucket_of_more_tokens_than_drafts_and_one_is_refused(drafts, q_len):
    model = oracle.drafting("dense").model
    with pytest.raises(SpecError, match=rf"decode-b2-q{q_len} with {drafts} drafts; legal is q_len 1 to {drafts + 1}"):
        step.program(model, decode(2, q_len), oracle.limits(drafts), torch.float32)


@pytest.mark.parametrize("bucket", [decode(1, 3), Bucket("prefill", 1, 4)], ids=str)
def test_drafts_without_a_draft_head_are_refused(bucket):
    model = oracle.case("dense").model
    assert not model.has_draft_head
    with pytest.raises(SpecError, match="2 drafts a step, and random has no draft head; legal is 0"):
        step.program(model, bucket, oracle.limits(2), torch.float32)


def test_the_draft_head_is_left_out_where_nothing_is_drafted():
    model = oracle.drafting("moe").model
    assert model.has_draft_head
    for drafting in (False, True):
        used = dataclasses.replace(model, drafting=drafting)
        assert ("mtp" in used.params(torch.float32)) == drafting
        assert ("mtp" in used.state(oracle.limits(2), torch.float32)) == drafting


@pytest.mark.parametrize("drafts", [0, 1, 3, 7])
@torch.no_grad()
def test_a_request_ends_with_the_longest_context(drafts):
    """No step gives more tokens than fit in the context, and nothing is written beyond the pages.

    A step that is launched after the end gives no tokens and moves nothing.
    """
    random, context = oracle.drafting("dense"), 24
    truth = speculators.Request(random.prompt(9), 1)
    speculators.Server(random.model, random.weights, 0).serve([truth], 24)
    for accepted in sorted({0, drafts // 2, drafts}):
        server = speculators.Server(random.model, random.weights, drafts, sizes=speculators.limits(drafts, context, 4))
        requests = [speculators.Request(truth.prompt, request_slot) for request_slot in (2, 4)]
        server.prefill(requests)
        for _ in range(18):
            places = [context - request.start for request in requests]
            for request, right in zip(requests, (accepted, drafts), strict=True):
                server.plant_drafts(request, truth.output, right)
            server.decode(requests, 3)
            for request, room, right in zip(requests, places, (accepted, drafts), strict=True):
                assert request.counts[-1] == min(right + 1, room)
                assert server.request_slots[request.request_slot, 0] == request.start <= context
        for request in requests:
            assert request.start == context
            assert request.output == truth.output[: len(request.output)]
        server.expect_untouched([2, 4])


@pytest.mark.parametrize("drafts", [1, 3])
@torch.no_grad()
def test_padding_counts_nothing_and_leaves_the_null_request_slot_as_it_was(drafts):
    """Beside a live row or by itself, in decode and prefill; other request slots keep their values."""
    random = oracle.drafting("moe")
    server = speculators.Server(random.model, random.weights, drafts)
    requests = [speculators.Request(random.prompt(5, i), 2 * i + 1) for i in range(2)]
    server.prefill(requests)
    slots = server.request_slots.clone()
    for bucket in (decode(4, drafts + 1), Bucket("prefill", 2, 16)):
        outputs = server.step(bucket, server.blank(bucket))
        assert not outputs.get("counts", torch.zeros(1)).any()
        assert torch.equal(server.request_slots, slots)
    outputs = server.decode(requests[:1], 4)
    assert outputs["counts"].tolist()[1:] == [0, 0, 0]
    assert not server.request_slots[0].any()
    assert torch.equal(server.request_slots[2:], slots[2:])


@pytest.mark.parametrize("drafts", [0, 3])
@torch.no_grad()
def test_graphs_of_prompts_do_what_the_programs_do(drafts):
    """Outputs and state of traced graphs that write in place are bit for bit those of the untraced functions."""
    random = oracle.drafting("moe")
    servers = [
        speculators.Server(random.model, random.weights, drafts, run_prefill=run) for run in (speculators.traced, speculators.direct)
    ]
    outputs = []
    for server in servers:
        requests = [speculators.Request(random.prompt(19, 1), 3), speculators.Request(random.prompt(6, 2), 1)]
        outputs.append(server.prefill(requests, [8, 16]))
    for name, tensor in outputs[0].items():
        assert torch.equal(tensor, outputs[1][name]), name
    for name, *pools in zip(servers[0].names, *(server.state for server in servers), strict=True):
        own = [pool[1:] if name != "request_slots" else pool for pool in pools]
        assert torch.equal(own[0].nan_to_num(-1), own[1].nan_to_num(-1)), name


def test_a_model_crosses_to_other_processes():
    for model in (oracle.case("moe").model, dataclasses.replace(oracle.drafting("moe").model, drafting=True)):
        assert pickle.loads(pickle.dumps(model)) == model


@torch.no_grad()
def test_without_logits_all_else_is_the_same():
    random = oracle.drafting("moe")
    for bucket in (Bucket("prefill", 1, 32), decode(2, 3)):
        row = oracle.Row(random.prompt(bucket.q_len), 0, [1, 2, 3, 4], 1, [1, 2, 3][: 1 if bucket.kind == "prefill" else 3])
        outputs = [oracle.Runner(random.model, random.weights, drafts=2).step(bucket, [row], emit_logits=emit) for emit in (True, False)]
        assert set(outputs[0]) - set(outputs[1]) == {"logits"}
        for name, tensor in outputs[1].items():
            assert torch.equal(tensor, outputs[0][name]), name
