"""Requests served by a model's programs in a minimal loop, with the drafts that a test plants."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from npucompile.graphs import ops, tree
from npucompile.graphs.ir.trace import trace
from npucompile.graphs.primitive import of_target
from npucompile.graphs.spmd.partition import partition
from npucompile.graphs.types import Aval, Bucket, Limits, Mesh, Program, Rules, Tree
from npucompile.lowering.backends.eager import EagerExecutable
from npucompile.lowering.lower import lower_eager
from npucompile.models import request_slots, step
from npucompile.runtime.rng import random_number

PAGE, CONTEXT, REQUESTS = 8, 256, 6
UNTAKEN = -(10**6)
"""What an unowned request slot holds: neither a token nor a position."""

Call = Callable[[list[torch.Tensor], list[torch.Tensor], dict[str, torch.Tensor]], dict[str, torch.Tensor]]
"""Weights, state and inputs -> outputs; the list of state is updated."""


def limits(drafts: int, context: int = CONTEXT, requests: int = REQUESTS) -> Limits:
    """Limits with room for `requests` requests of `context` tokens."""
    return Limits(PAGE, 1 + requests * context // PAGE, 1 + requests * (drafts + 1), context, drafts + 1, drafts)


@dataclass(frozen=True)
class Knobs:
    """Sampling parameters of a request; `drafts` is how many drafts are verified, None for all."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    drafts: int | None = None
    logprobs: bool = False


@dataclass
class Request:
    """A request: its prompt, its sampling and its output.

    Attributes:
        request_slot: its slot on the device, from which its pages and state slots follow.
        counts: tokens that each of its decode steps gave.
        drafted: drafts that its last step left for the next.
    """

    prompt: list[int]
    request_slot: int
    knobs: Knobs = field(default_factory=Knobs)
    output: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    drafted: int = 0

    @property
    def start(self) -> int:
        """Tokens that are in the caches: all but the last."""
        return len(self.prompt) + len(self.output) - 1

    def number(self, index: int) -> float:
        """Random number for its token `index`."""
        return random_number(self.knobs.seed, index)


def traced(program: Program) -> Call:
    """A program as the graph of an eager artifact, which writes state in place."""
    return _runs(program, lambda node: node.target)


def direct(program: Program) -> Call:
    """An untraced program, for buckets that are not worth a trace."""

    @torch.no_grad()
    def call(weights: list[torch.Tensor], state: list[torch.Tensor], inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        outputs, after = program.forward(tree.unflatten(program.params, weights), tree.unflatten(program.state, state), inputs)
        state[:] = [tensor for _, tensor in tree.flatten(after)]
        return dict(outputs)

    return call


def token_by_token(program: Program) -> Call:
    """Runs the traced graph with each matrix product and attention computed for one token at a time.

    The summation order of a matrix product may depend on its number of rows, and that of attention on its number of keys; a token's
    results would then depend, in their last bits, on the rows beside it.
    """
    return _runs(program, _row_by_row)


def _runs(program: Program, target: Callable[[Any], Any]) -> Call:
    lowered = lower_eager(partition(trace(program), Mesh(), Rules()))
    for node in lowered.graph.graph.nodes:
        if node.op == "call_function":
            node.target = target(node)
    run, names = EagerExecutable(lowered.graph), [leaf.path for leaf in lowered.signature.outputs]
    wanted = [leaf.path for leaf in lowered.signature.inputs]

    def call(weights: list[torch.Tensor], state: list[torch.Tensor], inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(zip(names, run([*weights, *state, *(inputs[name] for name in wanted)]), strict=True))

    return call


def _row_by_row(node: Any) -> Any:
    """The target of a node; for products, their reference on each row."""
    primitive = of_target(node.target)
    rows = {ops.linear.name: 1, ops.swiglu_linear.name: 1, ops.moe_experts.name: 3}
    if primitive is None or primitive.name not in (*rows, ops.paged_attention.name):
        return node.target
    reference = primitive.rule("reference")
    return functools.partial(_each_query, reference) if primitive is ops.paged_attention else _each_row(reference, rows[primitive.name])


def _each_row(reference: Any, count: int) -> Any:
    """A product whose first `count` operands have one row for each token. Rows are copied: MKL may sum in the order of an address."""

    def call(*args: Any) -> torch.Tensor:
        parts = zip(*([row.clone() for row in arg.split(1)] for arg in args[:count]), strict=True)
        return torch.cat([reference(*part, *args[count:]) for part in parts])

    return call


def _each_query(
    reference: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    query_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention applied query by query; NaN for queries that are not valid."""
    out = torch.full_like(q, float("nan"))
    for b, length in enumerate(query_lens.tolist()):
        for t in range(length):
            single = torch.ones(1, dtype=torch.int32)
            out[b : b + 1, t : t + 1] = reference(
                q[b : b + 1, t : t + 1].clone(), k, v, table[b : b + 1], num_computed_tokens[b : b + 1] + t, single, scale
            )
    return out


@functools.cache
def _executable(
    run: Callable[[Program], Call], model: step.Model, bucket: Bucket, sizes: Limits, logprobs: int
) -> tuple[Call, dict[str, Aval]]:
    """A bucket's program and its inputs, made once."""
    program = step.program(model, bucket, sizes, torch.float32, max_logprobs=logprobs)
    return run(program), program.inputs


class Server:
    """A model with its weights, pools full of NaN, and k drafts a step.

    Args:
        sizes: of the pools.
        logprobs: number of most likely tokens whose log probabilities are outputs.
        padding: token of padding, in rows of prompts and in the null request slot.
        run: turns a decode program, and `run_prefill` a prefill program, into a callable.
    """

    def __init__(
        self,
        model: step.Model,
        weights: Tree,
        drafts: int,
        *,
        sizes: Limits | None = None,
        logprobs: int = 0,
        padding: int = 0,
        run: Callable[[Program], Call] = traced,
        run_prefill: Callable[[Program], Call] = direct,
    ) -> None:
        self.drafts, self.limits, self.logprobs, self.padding = drafts, sizes or limits(drafts), logprobs, padding
        self.model = replace(model, drafting=drafts > 0)
        self._run = {"decode": run, "prefill": run_prefill}
        self.weights = [tensor for _, tensor in tree.flatten({name: weights[name] for name in self.model.params(torch.float32)})]
        avals = tree.flatten(self.model.state(self.limits, torch.float32))
        self.names = [name for name, _ in avals]
        self.state = [torch.full(a.shape, float("nan") if a.dtype.is_floating_point else UNTAKEN, dtype=a.dtype) for _, a in avals]
        self.request_slots[0] = 0

    @property
    def request_slots(self) -> torch.Tensor:
        """The pool of request slots [C, 2 + Q]."""
        return self.state[self.names.index("request_slots")]

    def pages(self, request_slot: int) -> list[int]:
        """All pages of a request slot's request; in falling order for every other request slot."""
        return _share(request_slot, self.limits.pages_per_request)

    def slots(self, request_slot: int) -> list[int]:
        """All state slots of a request slot's request; in falling order for every other request slot."""
        return _share(request_slot, self.limits.slots_per_request)

    def prefill(self, requests: Sequence[Request], chunks: Sequence[int] = (), batch: int | None = None) -> dict[str, torch.Tensor]:
        """Prefills prompts and outputs of requests and samples their next tokens.

        Args:
            chunks: sizes of successive prefill buckets; by default one bucket for the longest request.
            batch: rows of these buckets; by default one a request.

        Returns:
            the outputs of each request's last chunk.
        """
        known = [request.prompt + request.output for request in requests]
        last: dict[str, torch.Tensor] = {}
        done = 0
        for size in chunks or [max(map(len, known))]:
            bucket = Bucket("prefill", batch or len(requests), size)
            inputs = self.blank(bucket)
            for b, request in enumerate(requests):
                if part := known[b][done : done + size]:
                    self._fill_row(inputs, b, request)
                    inputs["tokens"][b, : len(part)] = torch.tensor(part, dtype=torch.int32)
                    inputs["num_computed_tokens"][b], inputs["query_lens"][b], inputs["state_slots_in"][b] = (
                        done,
                        len(part),
                        self.slots(request.request_slot)[0],
                    )
                    inputs["uniform"][b, 0] = request.number(len(request.output))
                    if self.drafts:
                        inputs["next_tokens"][b] = (known[b] + [-1])[done + len(part)]
            outputs = self.step(bucket, inputs)
            ending = torch.tensor([b < len(known) and done < len(known[b]) <= done + size for b in range(bucket.batch)])
            for name, tensor in outputs.items():
                last.setdefault(name, tensor.clone())[ending] = tensor[ending]
            done += size
        assert done >= max(map(len, known)), "the chunks cover all tokens"
        for b, request in enumerate(requests):
            request.output.append(int(last["tokens"][b, 0]))
            request.drafted = self.drafts
        return last

    def decode(self, requests: Sequence[Request], batch: int | None = None, width: int | None = None) -> dict[str, torch.Tensor]:
        """One decode step, with the inputs of a host that has not yet read how many tokens the previous step emitted.

        Args:
            width: tokens a request; by default one more than drafts.
        """
        bucket = Bucket("decode", batch or len(requests), width or self.drafts + 1)
        inputs = self.blank(bucket)
        for b, request in enumerate(requests):
            self._fill_row(inputs, b, request)
            behind = max(request.counts[-1] - 1, 0) if request.counts else 0
            inputs["base"][b] = request.start - behind
            inputs["drafts"][b] = min(self.verified(request), request.drafted, bucket.q_len - 1)
            numbers = [request.number(len(request.output) - behind + i) for i in range(inputs["uniform"].shape[1])]
            inputs["uniform"][b] = torch.tensor(numbers)
        if self.padding:
            self.request_slots[0] = self.padding
        outputs = self.step(bucket, inputs)
        for request, count, tokens in zip(requests, outputs["counts"].tolist(), outputs["tokens"].tolist(), strict=False):
            assert count or request.start == self.limits.max_model_len, "a request with room in its context gets a token"
            request.counts.append(count)
            request.output += tokens[:count]
            request.drafted = bucket.q_len - 1
        assert not outputs["counts"][len(requests) :].any(), "padding gets no tokens"
        return outputs

    def step(self, bucket: Bucket, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Runs a bucket's program."""
        return self._program(bucket)[0](self.weights, self.state, inputs)

    def serve(self, requests: Sequence[Request], tokens: int) -> None:
        """Prefills each request and decodes until each has at least so many tokens."""
        for request in requests:
            self.prefill([request])
        self.decode_until(requests, tokens)

    def decode_until(self, requests: Sequence[Request], tokens: int, widths: Iterable[int | None] = ()) -> None:
        """Decodes until each request has at least so many tokens, in steps of these widths first."""
        rest = itertools.chain(widths, itertools.repeat(None))
        while live := [request for request in requests if len(request.output) < tokens]:
            self.decode(live, width=next(rest))

    def substitute(self, request: Request, drafts: Sequence[int]) -> None:
        """Overwrites the drafts in a request's request slot."""
        self.request_slots[request.request_slot, request_slots.TOKENS + 1 :] = torch.tensor(drafts, dtype=torch.int32)

    def verified(self, request: Request) -> int:
        """How many of a request's drafts its steps verify."""
        return self.drafts if request.knobs.drafts is None else min(self.drafts, request.knobs.drafts)

    def plant_drafts(self, request: Request, truth: Sequence[int], right: int) -> None:
        """Plants drafts of which the first `right` are right, the next is wrong, and the others are right again.

        Drafts that are not verified are the padding token.

        Args:
            truth: the whole output of the request.
        """
        done, vocab = len(request.output), self.model.config.vocab_size
        drafts = list(truth[done : done + self.drafts])
        drafts += [1] * (self.drafts - len(drafts))
        if right < self.drafts:
            drafts[right] = (drafts[right] + 1) % vocab
        verified = self.verified(request)
        self.substitute(request, drafts[:verified] + [self.padding] * (self.drafts - verified))

    def memory(self, request: Request) -> dict[str, torch.Tensor]:
        """What the device holds of a request: recurrent state, keys and values of its computed tokens, its request slot."""
        request_slot = self.request_slots[request.request_slot]
        start, accepted = int(request_slot[request_slots.START]), int(request_slot[request_slots.ACCEPTED])
        memory = {
            "request_slots": torch.cat([request_slot[request_slots.START : request_slots.ACCEPTED], request_slot[request_slots.TOKENS :]])
        }
        for name, pool in zip(self.names, self.state, strict=True):
            if name.endswith((".k", ".v")):
                memory[name] = pool[self.pages(request.request_slot)].flatten(0, 1)[:start]
            elif name != "request_slots":
                memory[name] = pool[self.slots(request.request_slot)[accepted]]
        return {name: tensor.clone() for name, tensor in memory.items()}

    def expect_untouched(self, owned: Sequence[int]) -> None:
        """Fails if anything that belongs to a request slot outside `owned` was written."""
        others = [request_slot for request_slot in range(1, self.limits.num_request_slots) if request_slot not in owned]
        for name, pool in zip(self.names, self.state, strict=True):
            own = {"request_slots": [[request_slot] for request_slot in others]}.get(name)
            own = own or [self.pages(request_slot) if name.endswith((".k", ".v")) else self.slots(request_slot) for request_slot in others]
            for part in own:
                blank = pool[part] == UNTAKEN if name == "request_slots" else pool[part].isnan()
                assert blank.all(), f"{name} of a request slot that is not one of {owned}"

    def blank(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """Inputs of a bucket whose rows are all padding, with NaN for floats."""
        fill = {torch.float32: float("nan"), torch.int32: 0}
        inputs = {name: torch.full(aval.shape, fill[aval.dtype], dtype=aval.dtype) for name, aval in self._program(bucket)[1].items()}
        if "tokens" in inputs:
            inputs["tokens"].fill_(self.padding)
        return inputs

    def _program(self, bucket: Bucket) -> tuple[Call, dict[str, Aval]]:
        return _executable(self._run[bucket.kind], self.model, bucket, self.limits, self.logprobs)

    def _fill_row(self, inputs: dict[str, torch.Tensor], b: int, request: Request) -> None:
        """Fills the inputs that prefill and decode rows share."""
        inputs["request_slots"][b] = request.request_slot
        inputs["page_table"][b] = torch.tensor(self.pages(request.request_slot), dtype=torch.int32)
        slots = self.slots(request.request_slot)[: inputs["state_slots_out"].shape[1]]
        inputs["state_slots_out"][b] = torch.tensor(slots, dtype=torch.int32)
        for name in ("temperature", "top_k", "top_p", "min_p"):
            inputs[name][b] = getattr(request.knobs, name)
        if self.logprobs:
            inputs["logprobs"][b] = int(request.knobs.logprobs)


def _share(request_slot: int, per: int) -> list[int]:
    return list(range(1 + (request_slot - 1) * per, 1 + request_slot * per))[:: 1 if request_slot % 2 else -1]


PROMPTS = (12, 5, 9, 1, 16, 7)
SAYS = 150


class Course:
    """The outputs of greedy requests, and walks along them with planted drafts.

    Args:
        random: model of oracle.py with a draft head.

    Attributes:
        truth: tokens of each request, more than SAYS, generated without drafts.
    """

    def __init__(self, random: Any) -> None:
        self.random = random
        self.prompts = [random.prompt(length, i) for i, length in enumerate(PROMPTS)]
        requests = [self.request(i) for i in range(len(PROMPTS))]
        self.server(0).serve(requests, SAYS + 8)
        self.truth = [request.output for request in requests]

    def request(self, index: int, **knobs: Any) -> Request:
        """A request with one of the prompts, in a request slot of its own."""
        return Request(self.prompts[index], index + 1, Knobs(**knobs))

    def server(self, drafts: int, **options: Any) -> Server:
        """A server of the model."""
        return Server(self.random.model, self.random.weights, drafts, **options)

    def walk(
        self,
        server: Server,
        steps: Iterable[tuple[int | None, dict[int, int]]],
        drafts: Sequence[int | None] = (None,) * len(PROMPTS),
        until: int = SAYS,
        chunks: Sequence[int] = (),
    ) -> None:
        """Runs requests through steps with so many right drafts; fails where an output differs from the truth.

        A request that has enough tokens starts again in its request slot, with pages and slots full of old values.

        Args:
            steps: pairs of bucket size, None for the number of rows, and number of right drafts by request.
            drafts: how many drafts of each request are verified.
            chunks: sizes of the prefill buckets.
        """
        requests: dict[int, Request] = {}
        for size, rows in steps:
            for i in rows:
                if i not in requests or len(requests[i].output) > until:
                    requests[i] = self.request(i, drafts=drafts[i])
                    server.prefill([requests[i]], chunks)
            for i, right in rows.items():
                server.plant_drafts(requests[i], self.truth[i], right)
            live = [requests[i] for i in rows]
            before = [len(request.output) for request in live]
            server.decode(live, size)
            for i, request, length in zip(rows, live, before, strict=True):
                assert request.counts[-1] == min(rows[i], server.verified(request)) + 1
                assert len(request.output) == length + request.counts[-1]
                assert request.output == self.truth[i][: len(request.output)], f"request {i} after {length} tokens"


def textbook(logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[float]:
    """Probabilities of sampling from logits [V] in f64, by definition: of the `top_k` most likely tokens the smallest leading set whose
    mass reaches `top_p`, and of those the ones at least `min_p` times as likely as the most likely.
    """
    heat = (logits.double() / temperature).exp().tolist()
    order = sorted(range(len(heat)), key=lambda i: -heat[i])[: top_k or None]
    total, reached, allowed = sum(heat[i] for i in order), 0.0, []
    for i in order:
        if reached < top_p * total:
            allowed.append(i)
        reached += heat[i]
    allowed = [i for i in allowed if heat[i] >= min_p * max(heat)]
    total = sum(heat[i] for i in allowed)
    return [heat[i] / total if i in allowed else 0.0 for i in range(len(heat))]
