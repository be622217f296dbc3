"""Turns a small model on one device into a script: steps of several groups of requests, and what each must give on any mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..graphs.optimise import optimise
from ..graphs.partition import partition
from ..graphs.trace import signature_of
from ..graphs.types import Bucket, Leaf, Limits, Mesh
from ..lowering.backends.eager import EagerExecutable
from ..lowering.lower import lower_eager
from ..models import step
from .check import is_paged
from .scaled import PROMPT_MORE, Case, Scaled, held_params, rules_of

NAN = float("nan")
SAMPLED: Mapping[str, float] = {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "min_p": 0.01}
GREEDY: Mapping[str, float] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
Inputs = dict[str, torch.Tensor]
Run = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


@dataclass
class Request:
    """One request while it is played.

    Attributes:
        prompt: ids that are not in the cache yet.
        pages, slots: its own.
        at: tokens in the cache.
        read: slot that holds its state; 0 before it has one.
        last: the token it goes on with, once it has decoded.
        sampling: how its tokens are chosen.
        written: slots that its last step filled.
    """

    prompt: list[int]
    pages: list[int]
    slots: list[int]
    sampling: Mapping[str, float]
    at: int = 0
    read: int = 0
    last: int = 0
    written: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Expected:
    """What a group's live rows must give.

    Attributes:
        rows: live rows of the batch.
        valid: results of each that count, of W.
        greedy: whether the row's tokens are the most likely ones.
        tokens: [rows, W] i32.
        logits: [rows, W, V] f32.
    """

    rows: tuple[int, ...]
    valid: tuple[int, ...]
    greedy: tuple[bool, ...]
    tokens: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True)
class Turn:
    """One step of all groups: each one's inputs by name, and what it must give; None where it idles."""

    case: Case
    inputs: tuple[Inputs, ...]
    expected: tuple[Expected | None, ...]


@dataclass(frozen=True)
class Script:
    """All steps, and each group's state before and after.

    Attributes:
        leaves: state pools of the reference.
        first, last: a group's pools, by position of the leaf; NaN wherever nothing was written.
        pages: (page, tokens in it that hold something in the end) of each group.
        slots: slots of each group that hold something in the end.
    """

    turns: tuple[Turn, ...]
    leaves: tuple[Leaf, ...]
    first: tuple[list[torch.Tensor], ...]
    last: tuple[list[torch.Tensor], ...]
    pages: tuple[tuple[tuple[int, int], ...], ...]
    slots: tuple[tuple[int, ...], ...]


def rehearse(small: Scaled, checkpoint: Mapping[str, torch.Tensor], steps: int, generator: torch.Generator) -> Script:
    """Plays requests through the unsharded model: prompts in chunks where it prefills, then decode steps.

    Groups have different numbers of different requests, and the last of several idles at times. Decode rows lie at random places among
    padding, and candidates are what the model will say, or from a random place on something else: steps accept any number of tokens.
    """
    stage = _Stage(small, checkpoint, generator)
    first = tuple([pool.clone() for pool in state] for state in stage.states)
    turns = [*stage.prefill(), *stage.decode(steps)]
    pages, slots = [], []
    for group in stage.groups:
        size = small.limits.page_size
        held = [(page, min(size, one.at - i * size)) for one in group for i, page in enumerate(one.pages) if one.at > i * size]
        pages.append(tuple(held))
        slots.append(tuple(slot for one in group for slot in one.written))
    return Script(tuple(turns), stage.leaves, first, tuple(stage.states), tuple(pages), tuple(slots))


class _Stage:
    """The unsharded model with every group's requests and pools."""

    def __init__(self, small: Scaled, checkpoint: Mapping[str, torch.Tensor], generator: torch.Generator) -> None:
        self.small, self.generator = small, generator
        self.params = held_params(small.reference, checkpoint)
        self.vocab = int(small.reference.config.vocab_size)
        self.runs = {case.bucket: unsharded(small.reference, case.bucket, small.limits) for case in small.cases}
        program = step.program(small.reference, small.cases[0].bucket, small.limits, torch.float32)
        self.leaves = signature_of(program).state
        groups = range(small.mesh.axis("dp"))
        self.states = [[torch.full(leaf.aval.shape, NAN, dtype=leaf.aval.dtype) for leaf in self.leaves] for _ in groups]
        self.groups = [self._requests(group) for group in groups]
        self.of_kind = {kind: [case for case in small.cases if case.form.kind == kind] for kind in ("prefill", "decode")}
        if not self.of_kind["prefill"]:
            self._hand_over()

    def _requests(self, group: int) -> list[Request]:
        limits, most = self.small.limits, self.small.requests
        chunk = max((case.bucket.q_len for case in self.small.cases if case.form.kind == "prefill"), default=2 * PROMPT_MORE)
        lengths = [chunk + min(PROMPT_MORE - group % 5, chunk), 1 + group % 7, chunk // 2 + group % 3]
        pages = (1 + torch.randperm(limits.num_pages - 1, generator=self.generator)).tolist()
        slots = (1 + torch.randperm(limits.num_slots - 1, generator=self.generator)).tolist()
        made = []
        for i in range(most if group % 2 == 0 and not self.late(group) else 1):
            own = [pages.pop() for _ in range(limits.pages_per_request)]
            held = [slots.pop() for _ in range(limits.slots_per_request)]
            length = lengths[(i + group // 2) % 3]
            made.append(Request(self._tokens(length), own, held, SAMPLED if i == 1 else GREEDY))
        return made

    def _tokens(self, count: int) -> list[int]:
        return [int(i) for i in torch.randint(0, self.vocab, (count,), generator=self.generator)]

    def _hand_over(self) -> None:
        """Gives every request the state that instances which only prefill would send."""
        for group, state in zip(self.groups, self.states, strict=True):
            for one in group:
                one.at, one.read, one.last = len(one.prompt), one.slots[0], one.prompt[-1]
                one.prompt, one.written = [], [one.slots[0]]
                for leaf, pool in zip(self.leaves, state, strict=True):
                    if is_paged(leaf):
                        for i, page in enumerate(one.pages):
                            used = min(max(one.at - i * pool.shape[1], 0), pool.shape[1])
                            pool[page, :used] = torch.randn(used, *pool.shape[2:], generator=self.generator)
                    else:
                        pool[one.read] = 0.3 * torch.randn(pool.shape[1:], generator=self.generator)

    def prefill(self) -> Iterator[Turn]:
        """Chunks until no prompt is left; buckets take turns."""
        number = 0
        while cases := self.of_kind["prefill"]:
            waiting = [[one for one in group if one.prompt] for group in self.groups]
            if not any(waiting):
                return
            if any(waiting[:-1]):
                waiting[-1] = []
            yield self._turn(cases[number % len(cases)], waiting)
            number += 1

    def decode(self, steps: int) -> Iterator[Turn]:
        """So many steps of each bucket, in turn."""
        for number in range(steps):
            for case in self.of_kind["decode"]:
                # A row of padding where there is room for one; a request left out has its turn in the next step.
                most = max(1, case.bucket.batch - 1)
                ready = [[*group[number % len(group) :], *group][: len(group)][:most] for group in self.groups]
                yield self._turn(case, [[] if self.late(i) and number % 2 == 0 else group for i, group in enumerate(ready)])

    def late(self, group: int) -> bool:
        """Whether a group idles while others work: the last of several does, until their prompts are read, and every other step."""
        return len(self.states) > 1 and group == len(self.states) - 1

    def _turn(self, case: Case, waiting: Sequence[list[Request]]) -> Turn:
        inputs, expected = [], []
        for state, requests in zip(self.states, waiting, strict=True):
            given, told = self._play(case.bucket, state, requests[: case.bucket.batch])
            inputs.append(given)
            expected.append(told)
        return Turn(case, tuple(inputs), tuple(expected))

    def _play(self, bucket: Bucket, state: list[torch.Tensor], requests: list[Request]) -> tuple[Inputs, Expected | None]:
        rows = sorted(torch.randperm(bucket.batch, generator=self.generator)[: len(requests)].tolist())
        inputs = self._inputs(bucket, dict(zip(rows, requests, strict=True)))
        if not requests:
            return inputs, None
        if bucket.kind == "decode":
            self._draft(bucket, state, inputs, rows)
        tokens, logits = self._run(bucket, state, inputs)
        valid = []
        for row, one in zip(rows, requests, strict=True):
            valid.append(int(inputs["lengths"][row]) if bucket.kind == "decode" else 1)
            self._advance(bucket, one, inputs, row, tokens[row].tolist())
        greedy = tuple(one.sampling is GREEDY for one in requests)
        return inputs, Expected(tuple(rows), tuple(valid), greedy, tokens[rows].clone(), logits[rows].clone())

    def _inputs(self, bucket: Bucket, placed: Mapping[int, Request]) -> Inputs:
        B, Q, W = bucket.batch, bucket.q_len, bucket.q_len if bucket.kind == "decode" else 1
        made = {name: torch.zeros(B, dtype=torch.int32) for name in ("starts", "lengths", "read_slots", "top_k")}
        made |= {name: torch.zeros(B) for name in ("temperature", "top_p", "min_p")}
        made |= {"tokens": torch.zeros(B, Q, dtype=torch.int32), "write_slots": torch.zeros(B, W, dtype=torch.int32)}
        made["page_table"] = torch.zeros(B, self.small.limits.pages_per_request, dtype=torch.int32)
        made["uniform"] = torch.rand(B, W, generator=self.generator)
        made["top_p"].fill_(1.0)
        for row, one in placed.items():
            given = [one.last] if bucket.kind == "decode" else one.prompt[:Q]
            # A decode step may have fewer candidates than it has room for.
            count = Q - int(torch.randint(0, 4 * Q, (), generator=self.generator)) // (3 * Q) if bucket.kind == "decode" else len(given)
            count = max(count, 1)
            made["tokens"][row, : len(given)] = torch.tensor(given, dtype=torch.int32)
            made["starts"][row], made["lengths"][row] = one.at, count
            held = -(-(one.at + count) // self.small.limits.page_size)
            made["page_table"][row, :held] = torch.tensor(one.pages[:held], dtype=torch.int32)
            made["write_slots"][row] = torch.tensor(one.slots[:W], dtype=torch.int32)
            made["read_slots"][row] = one.read or one.slots[0]
            for name, value in one.sampling.items():
                made[name][row] = value
        return made

    def _draft(self, bucket: Bucket, state: list[torch.Tensor], inputs: Inputs, rows: list[int]) -> None:
        """Candidates: what the model says up to a random place, anything after it."""
        Q = bucket.q_len
        right = torch.randint(0, Q, (len(rows),), generator=self.generator).tolist()
        for row in rows:
            inputs["tokens"][row, 1:] = torch.tensor(self._tokens(Q - 1), dtype=torch.int32)
        for place in range(1, max(right) + 1):
            said, _ = self._run(bucket, [pool.clone() for pool in state], inputs)
            for row, good in zip(rows, right, strict=True):
                if place <= good:
                    inputs["tokens"][row, place] = said[row, place - 1]

    def _advance(self, bucket: Bucket, one: Request, inputs: Inputs, row: int, said: list[int]) -> None:
        length, given = int(inputs["lengths"][row]), inputs["tokens"][row].tolist()
        if bucket.kind == "prefill":
            one.at, one.read, one.written = one.at + length, one.slots[0], [one.slots[0]]
            one.prompt, one.last = one.prompt[length:], said[0]
            return
        accepted = next((i for i in range(1, length) if said[i - 1] != given[i]), length)
        one.at, one.last = one.at + accepted, said[accepted - 1]
        one.read, one.written = one.slots[accepted - 1], one.slots[:length]

    def _run(self, bucket: Bucket, state: list[torch.Tensor], inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and logits; the state advances."""
        executable, names, outputs = self.runs[bucket]
        results = dict(zip(outputs, executable([*self.params, *state, *(inputs[name] for name in names)]), strict=True))
        return results["tokens"], results["logits"]


def unsharded(model: step.Model, bucket: Bucket, limits: Limits) -> tuple[Run, tuple[str, ...], tuple[str, ...]]:
    """A bucket's step on one device, node by node with the references, in float32; and the names of its inputs and outputs."""
    program = step.program(model, bucket, limits, torch.float32)
    made = optimise(partition(program, Mesh(), rules_of(model, Mesh(), bucket)))
    executable = EagerExecutable(lower_eager(made).graph)
    inputs, outputs = (tuple(leaf.name.partition(".")[2] for leaf in part) for part in (made.signature.inputs, made.signature.outputs))
    return executable, inputs, outputs
