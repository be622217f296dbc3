"""models/sampling.py: outputs are distributed as the model says, with and without drafts, and log probabilities are its own."""

from __future__ import annotations

import functools
import itertools
import random

import pytest
import torch
from support import oracle, speculators

from npucompile.graphs import ops
from npucompile.graphs.spmd.partition import partition
from npucompile.graphs.steps.inputs import MAX_RANKED
from npucompile.graphs.types import Aval, Bucket, Mesh, Program, Rules
from npucompile.lowering.ascend import lowered
from npucompile.lowering.ascend.emulator.interpreter import Interpreter
from npucompile.models import request_slots
from npucompile.models.sampling import ADJUSTING, best, sample_tokens, score_tokens

KNOBS = {
    "temperature": {"temperature": 0.8},
    "top-k": {"temperature": 1.0, "top_k": 2},
    "top-p": {"temperature": 1.0, "top_p": 0.75},
    "min-p": {"temperature": 1.0, "min_p": 0.25},
    "all": {"temperature": 1.3, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
}

# --- the joint distribution of four tokens, over a vocabulary of four ---

V, SAYS, DRAFTS = 4, 4, 2
PROMPT = [1, 3, 0, 2, 2]
INSET = 1e-5
"""Margin at the ends of an interval of random numbers, because logits are computed in f32."""


@pytest.fixture(scope="module")
def small():
    """A random model of two layers and four tokens, with a draft head."""
    linear = {"linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 4, "linear_value_head_dim": 4}
    sizes = {"vocab_size": V, "hidden_size": 12, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    return oracle.with_head(oracle.build(oracle.settings("lf", **sizes, **linear), seed=6))


@pytest.fixture(scope="module")
def after(small):
    """Logits of transformers after every text of up to three tokens."""
    with torch.no_grad():
        texts = torch.tensor([[*PROMPT, *output] for output in itertools.product(range(V), repeat=SAYS - 1)])
        logits = small.theirs(texts).logits.float()
    rows = {tuple(text[len(PROMPT) :]): row for text, row in zip(texts.tolist(), logits, strict=True)}
    return {output[:n]: row[len(PROMPT) - 1 + n] for output, row in rows.items() for n in range(SAYS)}


def crowd(small, drafts, knobs, numbers, substituted=None):
    """Outputs of B requests with one prompt, and the tokens of each decode step [B], 0 where a request already had enough.

    Args:
        drafts: k.
        numbers: [B, SAYS] random numbers of their tokens.
        substituted: [B, k] drafts of every step; None leaves those of the head.
    """
    B, Q, sizes = len(numbers), drafts + 1, speculators.limits(drafts, 32, len(numbers))
    server = speculators.Server(small.model, small.weights, drafts, sizes=sizes, run=speculators.direct)
    row, N = torch.arange(B, dtype=torch.int32), sizes.pages_per_request

    def inputs_of(bucket, **known):
        inputs = server.blank(bucket)
        inputs |= {"request_slots": row + 1, "page_table": 1 + N * row[:, None] + torch.arange(N, dtype=torch.int32)}
        inputs["state_slots_out"] = 1 + Q * row[:, None] + torch.arange(inputs["state_slots_out"].shape[1], dtype=torch.int32)
        for name, value in {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **knobs}.items():
            inputs[name].fill_(value)
        return inputs | known

    bucket, tokens = Bucket("prefill", B, len(PROMPT)), torch.tensor(PROMPT, dtype=torch.int32).expand(B, -1)
    known = {
        "tokens": tokens,
        "num_computed_tokens": 0 * row,
        "query_lens": 0 * row + len(PROMPT),
        "state_slots_in": 0 * row,
        "uniform": numbers[:, :1],
    }
    known |= {"next_tokens": 0 * row - 1} if drafts else {}
    output, count, counts = torch.zeros(B, 32, dtype=torch.int32), torch.ones(B, dtype=torch.int64), []
    output[:, :1] = server.step(bucket, inputs_of(bucket, **known))["tokens"]
    numbers = torch.nn.functional.pad(numbers, (0, 32), value=0.5)
    while int(count.min()) < SAYS:
        if substituted is not None:
            server.request_slots[1:, request_slots.TOKENS + 1 :] = substituted
        bucket, base = Bucket("decode", B, Q), (len(PROMPT) + count - 1).int()
        window = numbers.gather(1, count[:, None] + torch.arange(2 * Q - 1))
        outputs = server.step(bucket, inputs_of(bucket, drafts=0 * row + drafts, base=base, uniform=window))
        assert int(outputs["counts"].min()) > 0, "a request with room in its context gets a token"
        output.scatter_(1, count[:, None] + torch.arange(Q), outputs["tokens"])
        counts.append(outputs["counts"].where(count < SAYS, 0))
        count += outputs["counts"]
    return output[:, :SAYS], counts


def output_intervals(after, textbook):
    """Every output, with the interval of random numbers that samples each of its tokens: [n, SAYS] and [n, SAYS, 2].

    Outputs with an empty or too short interval are left out.
    """
    outputs, intervals = [], []
    edges = {}
    for output, logits in after.items():
        p = textbook(logits)
        edges[output] = [0.0, *itertools.accumulate(p)]
    for output in itertools.product(range(V), repeat=SAYS):
        bounds = [(edges[output[:i]][token], edges[output[:i]][token + 1]) for i, token in enumerate(output)]
        if all(high - low > 4 * INSET for low, high in bounds):
            outputs.append(output)
            intervals.append(bounds)
    return torch.tensor(outputs, dtype=torch.int32), torch.tensor(intervals, dtype=torch.float64)


@pytest.mark.parametrize("knobs", KNOBS.values(), ids=KNOBS)
def test_the_joint_distribution_is_that_of_the_model_whatever_is_drafted(small, after, knobs):
    """By enumeration. Given earlier tokens and drafts a token is a step function of its random number, so the probability of an output
    is the product of the intervals that sample its tokens. Those must be the textbook's intervals for transformers' logits: for every
    output and every pair of drafts, both ends of each interval sample the output.
    """
    outputs, intervals = output_intervals(after, functools.partial(speculators.textbook, **knobs))
    probability = (intervals[:, :, 1] - intervals[:, :, 0]).prod(1)
    assert float(probability.sum()) == pytest.approx(1, abs=1e-3)
    pairs = torch.tensor(list(itertools.product(range(V), repeat=DRAFTS)), dtype=torch.int32)
    seen_counts = set()
    for end, inwards in ((0, INSET), (1, -INSET)):
        numbers = (intervals[:, :, end] + inwards).float().repeat(len(pairs), 1)
        sampled_ids, counts = crowd(small, DRAFTS, knobs, numbers, pairs.repeat_interleave(len(outputs), 0))
        assert torch.equal(sampled_ids, outputs.repeat(len(pairs), 1))
        seen_counts |= set(counts[0].tolist())
    assert seen_counts == {1, 2, 3}


@pytest.mark.parametrize("knobs", KNOBS.values(), ids=KNOBS)
def test_random_numbers_give_the_same_output_with_the_drafts_of_the_head(small, after, knobs):
    """With three drafts as without, and distributed as the model says (chi-square, 1e-3)."""
    numbers = torch.rand(4000, SAYS, generator=torch.Generator().manual_seed(3), dtype=torch.float64).mul(2**24).floor().div(2**24).float()
    sampled_ids, counts = crowd(small, 3, knobs, numbers)
    plain, _ = crowd(small, 0, knobs, numbers)
    assert torch.equal(sampled_ids, plain)
    assert set(torch.cat(counts).tolist()) == {0, 1, 2, 3, 4}
    outputs, intervals = output_intervals(after, functools.partial(speculators.textbook, **knobs))
    expected = (intervals[:, :, 1] - intervals[:, :, 0]).prod(1) * len(numbers)
    observed = torch.tensor([int((sampled_ids == output).all(1).sum()) for output in outputs], dtype=torch.float64)
    # Rare outputs count as one.
    often = expected >= 5
    expected = torch.cat([expected[often], len(numbers) - expected[often].sum(0, keepdim=True)])
    observed = torch.cat([observed[often], len(numbers) - observed[often].sum(0, keepdim=True)])
    statistic, freedom = ((observed - expected) ** 2 / expected.clamp(min=1)).sum(), len(expected) - 1
    assert float(torch.special.gammaincc(torch.tensor(freedom / 2).double(), statistic / 2)) > 1e-3


# --- requests that sample ---

MODELS = ["dense", "moe"]
TRAINED = "qwen3.5-tiny"
LONG = 24
BORDER = 1e-6
"""Rounding moves the borders between tokens by less, so a random number farther from all of them samples the same token."""


class Sampled:
    """Requests that sample, each with other settings, and their outputs alone and without drafts.

    Attributes:
        who: their numbers; for a large vocabulary only those that cut it, because every allowed token adds a border.
    """

    def __init__(self, name):
        self.make, self.model = speculators, oracle.drafting(name)
        self.who = (1, 2, 3, 4) if name == TRAINED else (0, 1, 2, 3, 4, 5)
        self.ways = [*KNOBS.values(), {"temperature": 1.0}]
        self.prompts = [self.model.prompt(length, i) for i, length in enumerate((9, 14, 3, 21, 1, 6))]
        self.truth = {}
        for i in self.who:
            request = self.request(i)
            self.server(0).serve([request], LONG + 4)
            self.truth[i] = request.output
            self._far_from_borders(request, self.ways[i])

    def _far_from_borders(self, request, knobs):
        logits = self.model.logits([*request.prompt, *request.output[:-1]])[len(request.prompt) - 1 :]
        for i, row in enumerate(logits):
            borders = torch.tensor(self.make.textbook(row, **knobs)).double().cumsum(0)
            assert float((borders - request.number(i)).abs().min()) > BORDER, f"take another seed for a request with {knobs}"

    def request(self, i, **knobs):
        return self.make.Request(self.prompts[i], i + 1, self.make.Knobs(seed=100 + i, **self.ways[i], **knobs))

    def requests(self, **knobs):
        return [self.request(i, **knobs) for i in self.who]

    def server(self, drafts, **options):
        return self.make.Server(self.model.model, self.model.weights, drafts, **options)

    def expect(self, requests):
        for request in requests:
            i = self.prompts.index(request.prompt)
            assert len(request.output) >= LONG
            assert request.output[:LONG] == self.truth[i][:LONG], f"request {i}"


@pytest.fixture(scope="module")
def sampled():
    return functools.cache(lambda name: Sampled(name))


@pytest.mark.short_cases("moe")
@pytest.mark.parametrize("name", [*MODELS, TRAINED])
def test_sampled_outputs_are_the_same_alone_and_in_a_full_batch(sampled, name):
    """With the head's own drafts, of which each request in the batch verifies another number."""
    cases = sampled(name)
    assert len({tuple(output) for output in cases.truth.values()}) == len(cases.who)
    singles = [cases.request(2), cases.request(3)]
    for request in singles:
        cases.server(3).serve([request], LONG)
    together = [cases.request(i, drafts=(i + 1) % 4) for i in cases.who]
    cases.server(3).serve(together, LONG)
    cases.expect([*singles, *together])
    if name == TRAINED:
        assert {1, 2, 3} <= {count for request in together for count in request.counts}


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("name", MODELS)
def test_sampled_outputs_are_the_same_after_preemption_and_for_any_chunks(sampled, name, drafts):
    """Requests are prefilled in any chunks, preempted at any time, and prefilled again in another request slot."""
    cases, draw = sampled(name), random.Random(9)
    server, requests = cases.server(drafts), cases.requests()

    def cuts(length):
        at = sorted({*draw.sample(range(1, length + 1), min(2, length)), length})
        return [high - low for low, high in itertools.pairwise([0, *at])]

    for request in requests:
        server.prefill([request], cuts(len(request.prompt)))
    for stop in (7, 15):
        server.decode_until(requests, stop)
        preempted = draw.sample(requests, 4)
        for request, request_slot in zip(preempted, draw.sample([request.request_slot for request in preempted], 4), strict=True):
            request.request_slot, request.counts = request_slot, []
            server.prefill([request], cuts(len(request.prompt) + len(request.output)))
    server.decode_until(requests, LONG)
    cases.expect(requests)


# --- log probabilities ---

MOST = 5


@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_are_those_of_the_models_logits(sampled, name):
    """For every output token, greedy or sampled: those of transformers over the whole text, before temperature and cuts. Rows that did
    not ask hold zeros.
    """
    cases, draw = sampled(name), random.Random(10)
    server = cases.server(3, logprobs=MOST)
    requests = [cases.request(i, logprobs=i != 2) for i in cases.who]
    reported = [[] for _ in requests]
    outputs = server.prefill(requests)
    while True:
        for i, request in enumerate(requests):
            count = request.counts[-1] if request.counts else 1
            parts = [outputs[name][i, :count] for name in ("chosen_logprobs", "top_ids", "top_logprobs")]
            reported[i].extend(zip(request.output[-count:], *parts, strict=True))
            server.plant_drafts(request, cases.truth[i], draw.randint(0, 3))
        if all(len(request.output) >= LONG - 4 for request in requests):
            break
        outputs = server.decode(requests, 8)
        assert all(not outputs[name][len(requests) :].any() for name in ("chosen_logprobs", "top_ids", "top_logprobs"))
    for i, (request, rows) in enumerate(zip(requests, reported, strict=True)):
        assert [token for token, *_ in rows] == request.output
        logprobs = cases.model.logits([*request.prompt, *request.output[:-1]])[len(request.prompt) - 1 :].double().log_softmax(-1)
        for (token, chosen, ids, values), row in zip(rows, logprobs, strict=True):
            if i == 2:
                assert not any(part.any() for part in (chosen, ids, values))
                continue
            most = row.sort(descending=True)[0][:MOST]
            assert abs(float(chosen) - float(row[token])) < 1e-4
            torch.testing.assert_close(values.double(), most, atol=1e-4, rtol=0)
            torch.testing.assert_close(row[ids.long()], most, atol=1e-4, rtol=0)
            assert len(set(ids.tolist())) == MOST


# --- over a split vocabulary ---

ROWS = Rules.of({"vocab": "tp", "sampled_rows": "tp"})
F32, I32 = torch.float32, torch.int32


def adjustments(draw, width, vocab):
    """Adjustments of four rows, of which the second has none."""
    words = torch.randint(-(2**31), 2**31, (3, width, -(-vocab // 32)), generator=draw).to(I32)
    rows = [torch.tensor(numbers, dtype=I32) for numbers in ([1, 0, 0, 2], [3, 0, 1, 0], [0, 0, 2, 1])]
    tables, factors = torch.randn(3, width, vocab, generator=draw), torch.tensor([1.0, 1.0, 1.3, 0.7])
    return dict(zip(ADJUSTING, (tables, rows[0], rows[1], words, rows[2], factors), strict=True))


def on_all_devices(fn, avals, values, mesh, lower=lambda partitioned: partitioned.graph):
    """Results of `fn` of named values on every device of a mesh."""
    program = Program("toy", Bucket("decode", 4, 1), lambda p, s, i: (fn(p | i), s), {"logits": avals.pop("logits")}, {}, avals)
    partitioned, tp = partition(program, Mesh.parse(mesh), ROWS), Mesh.parse(mesh).axis("tp")
    shards = values["logits"].chunk(tp, -1)
    coords = [[torch.tensor([0, rank], dtype=I32)] if tp > 1 else [] for rank in range(tp)]
    operands = [[shards[rank], *(values[name] for name in avals), *coords[rank]] for rank in range(tp)]
    return Interpreter(lower(partitioned), partitioned.mesh)(operands)


@pytest.mark.parametrize("mesh", ["tp=2", "tp=4"])
def test_the_best_token_is_the_lowest_of_the_most_likely(mesh):
    """Ties on one device, on neighbours, and between the first and the last."""
    logits = torch.zeros(4, 12)
    logits[0, [4, 5]], logits[1, [5, 6]], logits[2, [2, 11]], logits[3, 9] = 1.0, 2.0, 3.0, 1.0
    assert best(logits).tolist() == [4, 5, 2, 9]
    avals = {"logits": Aval((4, 12), F32, (None, "vocab")), "unused": Aval((4,), F32)}
    for (token,) in on_all_devices(lambda x: {"t": best(x["logits"])}, avals, {"logits": logits, "unused": torch.zeros(4)}, mesh):
        assert token.tolist() == [4, 5, 2, 9]
        assert token.dtype == I32


@pytest.mark.parametrize("emit", [True, False])
@pytest.mark.parametrize("mesh", ["tp=2", "tp=4"])
def test_every_device_gets_the_same(mesh, emit):
    """Tokens and log probabilities of a split vocabulary are those of a whole one, with logits gathered or rows shared out."""
    draw = torch.Generator().manual_seed(2)
    values = {"logits": torch.randn(8, 12, generator=draw) * 2, "uniform": torch.rand(4, 2, generator=draw)}
    values |= {"temperature": torch.tensor([0.0, 1.0, 0.5, 2.0]), "top_k": torch.tensor([0, 0, 3, 5], dtype=I32)}
    values |= {"top_p": torch.tensor([1.0, 0.9, 1.0, 0.8]), "min_p": torch.tensor([0.0, 0.0, 0.1, 0.2])}
    values |= {"logprobs": torch.tensor([1, 0, 1, 1], dtype=I32)} | adjustments(draw, 2, 12)

    def run(x):
        return sample_tokens(x["logits"], x, x["uniform"], emit_logits=emit, max_logprobs=3)

    avals = {name: Aval(tuple(value.shape), value.dtype) for name, value in values.items()}
    avals["logits"] = Aval((8, 12), F32, (None, "vocab"))
    expected = run(values)
    logits = ops.adjust_logits(values["logits"].view(4, 2, 12), *(values[name] for name in ADJUSTING))
    assert torch.equal(expected["tokens"], ops.sample(logits, *(values[n] for n in ("temperature", "top_k", "top_p", "min_p", "uniform"))))
    for results in on_all_devices(run, avals, values, mesh):
        for name, tensor in zip(expected, results, strict=True):
            torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=0)


@pytest.mark.parametrize("emit", [True, False])
@pytest.mark.parametrize(("mesh", "rows"), [("tp=2", 3), ("tp=4", 2), ("tp=4", 3)])
def test_known_tokens_have_the_log_probabilities_of_a_whole_vocabulary(mesh, rows, emit):
    """Of 12 tokens, and two of padding: whether or not devices can share the rows."""
    draw = torch.Generator().manual_seed(rows)
    values = {"logits": torch.randn(rows * 2, 16, generator=draw) * 2, "tokens": torch.arange(rows * 2, dtype=I32).view(rows, 2)}
    values |= {"logprobs": (torch.arange(rows) != 1).to(I32)}

    def run(x):
        how = {"emit_logits": emit, "max_logprobs": 3, "vocab_size": 14}
        return score_tokens(x["logits"], x["tokens"], x["logprobs"], x["tokens"], **how)

    avals = {name: Aval(tuple(value.shape), value.dtype) for name, value in values.items()}
    avals["logits"] = Aval((rows * 2, 16), F32, (None, "vocab"))
    logprobs = values["logits"][:, :14].log_softmax(-1).view(rows, 2, 14)
    asked = values["logprobs"][:, None, None].bool()
    expected = {"tokens": values["tokens"]}
    expected["chosen_logprobs"] = torch.where(asked, logprobs.gather(-1, values["tokens"][..., None].long()), 0)[..., 0]
    expected["top_logprobs"] = torch.where(asked, logprobs.topk(3).values, 0)
    names = list(run(values))
    for results in on_all_devices(run, avals, values, mesh):
        found = dict(zip(names, results, strict=True))
        assert ("logits" in found) == emit
        for name, right in expected.items():
            torch.testing.assert_close(found[name], right, atol=1e-6, rtol=0)
        assert torch.equal(found["top_ids"] * asked, (logprobs.topk(3).indices * asked).to(I32))


@pytest.mark.parametrize("mesh", ["tp=1", "tp=2", "tp=4"])
def test_npus_sample_what_the_definition_says_of_a_split_vocabulary(mesh):
    """More tokens than are ranked, in bfloat16, so that many equal each other and the last one kept."""
    rows, width, vocab = 8, 3, 3 * MAX_RANKED + 64
    draw = torch.Generator().manual_seed(5)
    values = {
        "logits": (torch.randn(rows * width, vocab, generator=draw) * 2).bfloat16(),
        "uniform": torch.rand(rows, width, generator=draw),
    }
    values |= {"temperature": torch.tensor([0.0, 1.0, 0.5, 2.0, 1.0, 1.0, 40.0, 0.1])}
    values |= {"top_k": torch.tensor([0, 0, 3, 500, MAX_RANKED, 20, MAX_RANKED, 1], dtype=I32)}
    values |= {"top_p": torch.tensor([1.0, 1.0, 1.0, 0.8, 1.0, 0.9, 0.99, 0.5])}
    values |= {"min_p": torch.tensor([0.0, 0.02, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0])}
    values |= {
        name: value if name in ("adjustments", "seen") else value.repeat(2) for name, value in adjustments(draw, width, vocab).items()
    }
    adjusted = ops.adjust_logits(values["logits"].float().view(rows, width, vocab), *(values[name] for name in ADJUSTING))
    expected = ops.sample(
        adjusted,
        *(values[name] for name in ("temperature", "top_k", "top_p", "min_p", "uniform")),
    )
    avals = {name: Aval(tuple(value.shape), value.dtype) for name, value in values.items()}
    avals["logits"] = Aval((rows * width, vocab), torch.bfloat16, (None, "vocab"))

    def run(x):
        return sample_tokens(x["logits"], x, x["uniform"], emit_logits=False, max_logprobs=0) | {"best": best(x["logits"])}

    for tokens, largest in on_all_devices(run, avals, values, mesh, lambda partitioned: lowered.lower(partitioned).graph):
        assert torch.equal(tokens, expected)
        assert torch.equal(largest, values["logits"].float().argmax(-1).to(I32))
