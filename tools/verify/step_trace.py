"""Turns a small model on one device into a script: steps of several groups of requests, and what each must give on any mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ...graphs.step_inputs import StepInputs
from ...graphs.types import Bucket, Leaf
from ...models import request_slots as seats
from .compare import is_paged, is_seats
from .reference_run import THOUGHT, Alone
from .small_model import PROMPT_MORE, Case, Scaled, held_params

NAN = float("nan")
NOBODYS = -7
"""In seats that belong to nobody: no token, no position and no slot."""
SAMPLED: Mapping[str, float] = {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "min_p": 0.01}
GREEDY: Mapping[str, float] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
Inputs = dict[str, torch.Tensor]


@dataclass
class Request:
    """One request while it is played.

    Attributes:
        prompt: ids that are not in the cache yet.
        pages, slots, seat: its own.
        sampling: how its tokens are chosen.
        at: tokens in the cache.
        written: slots that its last step filled.
    """

    prompt: list[int]
    pages: list[int]
    slots: list[int]
    seat: int
    sampling: Mapping[str, float]
    at: int = 0
    written: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Expected:
    """What a group's live rows must give.

    Attributes:
        rows: live rows of the batch.
        valid: results of each that mean something, of W.
        taken: tokens by which each one's caches grow.
        greedy: whether the row's tokens are the most likely ones.
        tokens: [rows, W] i32.
        logits: [rows, W, V] f32.
        drafts: [rows, k] i32.
        thoughts: [rows, k, V] f32, the draft head's logits of them.
    """

    rows: tuple[int, ...]
    valid: tuple[int, ...]
    taken: tuple[int, ...]
    greedy: tuple[bool, ...]
    tokens: torch.Tensor
    logits: torch.Tensor
    drafts: torch.Tensor
    thoughts: torch.Tensor


@dataclass(frozen=True)
class Turn:
    """One step of all groups.

    Attributes:
        inputs: each group's, by name.
        seats: each group's pool of seats before the step: an input in all but name.
        expected: what each group must give; None where it idles.
    """

    case: Case
    inputs: tuple[Inputs, ...]
    seats: tuple[torch.Tensor, ...]
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


def rehearse(small: Scaled, checkpoint: Mapping[str, torch.Tensor], generator: torch.Generator) -> Script:
    """Plays requests through the unsharded model: prompts in chunks where it prefills, then decode steps.

    Groups have different numbers of different requests, and the last of several idles at times. Decode rows lie at random places among
    padding. Before a step other drafts are put in its seats: as many right ones as the next count in turn wants, then one that is wrong.
    Some rows have drafts of which not all, or none, are to be verified. One request was sent here with a state that is nearly as long as
    a context can be, and ends there.
    """
    stage = _Stage(small, checkpoint, generator)
    first = tuple([pool.clone() for pool in state] for state in stage.states)
    turns = [*stage.prefill(), *stage.decode()]
    pages, slots = [], []
    for group in stage.groups:
        size = small.limits.page_size
        held = [(page, min(size, one.at - i * size)) for one in group for i, page in enumerate(one.pages) if one.at > i * size]
        pages.append(tuple(held))
        slots.append(tuple(slot for one in group for slot in one.written))
    return Script(tuple(turns), stage.leaves, first, tuple(stage.states), tuple(pages), tuple(slots))


def seat_pool(leaves: Sequence[Leaf]) -> int:
    """Position of the pool of seats among state pools."""
    return next(i for i, leaf in enumerate(leaves) if is_seats(leaf))


class _Stage:
    """The unsharded model with every group's requests and pools."""

    def __init__(self, small: Scaled, checkpoint: Mapping[str, torch.Tensor], generator: torch.Generator) -> None:
        self.small, self.generator = small, generator
        self.drafts, self.vocab = small.limits.drafts, int(small.reference.config.vocab_size)
        self.alone = Alone(small.reference, small.limits, held_params(small.reference, checkpoint), small.max_logprobs)
        self.leaves = self.alone.leaves(small.cases[0].bucket)
        self.seats = seat_pool(self.leaves)
        self.of_kind = {kind: [case for case in small.cases if case.form.kind == kind] for kind in ("prefill", "decode")}
        self.left = small.steps * len(self.of_kind["decode"])
        self.decoded = dict.fromkeys(self.of_kind["decode"], 0)
        self.states = [self._empty() for _ in range(small.mesh.axis("dp"))]
        self.groups = [self._requests(group) for group in range(len(self.states))]

    def _empty(self) -> list[torch.Tensor]:
        pools = [
            torch.full(leaf.aval.shape, NAN if leaf.aval.dtype.is_floating_point else NOBODYS, dtype=leaf.aval.dtype)
            for leaf in self.leaves
        ]
        pools[self.seats][0] = 0
        return pools

    def _requests(self, group: int) -> list[Request]:
        limits, most = self.small.limits, self.small.requests
        chunk = max((case.bucket.q_len for case in self.of_kind["prefill"]), default=2 * PROMPT_MORE)
        lengths = [chunk + min(PROMPT_MORE - group % 5, chunk), 1 + group % 7, chunk // 2 + group % 3]
        lengths = [min(length, chunk) for length in lengths] if self.late(group) else lengths
        pages, slots, free = (self._shuffled(count) for count in (limits.num_pages, limits.num_slots, limits.num_seats))
        made = []
        for i in range(most if group % 2 == 0 and not self.late(group) else 1):
            own = [pages.pop() for _ in range(limits.pages_per_request)]
            held = [slots.pop() for _ in range(limits.slots_per_request)]
            one = Request(self._tokens(lengths[(i + group // 2) % 3]), own, held, free.pop(), SAMPLED if i == 1 else GREEDY)
            if i == 2 and self.left:
                # One accepted draft and one token of each step are left until its end.
                self._hand_over(self.states[group], one, limits.max_model_len - self.left - 1)
            elif not self.of_kind["prefill"]:
                self._hand_over(self.states[group], one, len(one.prompt))
            made.append(one)
        return made

    def _shuffled(self, count: int) -> list[int]:
        """All numbers below `count` but 0, which is null."""
        return [1 + int(i) for i in torch.randperm(count - 1, generator=self.generator)]

    def _tokens(self, count: int) -> list[int]:
        return [int(i) for i in torch.randint(0, self.vocab, (count,), generator=self.generator)]

    def _hand_over(self, state: list[torch.Tensor], one: Request, at: int) -> None:
        """Gives a request the state that an instance which only prefills would send, of a prompt of so many tokens."""
        one.at, one.prompt, one.written = at, [], one.slots[:1]
        for leaf, pool in zip(self.leaves, state, strict=True):
            if is_paged(leaf):
                for i, page in enumerate(one.pages):
                    used = min(max(at - i * pool.shape[1], 0), pool.shape[1])
                    pool[page, :used] = torch.randn(used, *pool.shape[2:], generator=self.generator)
            elif is_seats(leaf):
                pool[one.seat] = torch.tensor([at, 0, *self._tokens(1 + self.drafts)], dtype=torch.int32)
            else:
                pool[one.slots[0]] = 0.3 * torch.randn(pool.shape[1:], generator=self.generator)

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

    def decode(self) -> Iterator[Turn]:
        """So many steps of each bucket, in turn."""
        for number in range(self.small.steps):
            for case in self.of_kind["decode"]:
                self.left -= 1
                # A row of padding where there is room for one; a request left out has its turn in the next step.
                most = max(1, case.bucket.batch - 1)
                ready = [[*group[number % len(group) :], *group][: len(group)][:most] for group in self.groups]
                yield self._turn(case, [[] if self.late(i) and number % 2 == 0 else group for i, group in enumerate(ready)])

    def late(self, group: int) -> bool:
        """Whether a group idles while others work: the last of several does, until their prompts are read, and every other step."""
        return len(self.states) > 1 and group == len(self.states) - 1

    def _turn(self, case: Case, waiting: Sequence[list[Request]]) -> Turn:
        played = [self._play(case, group, requests[: case.bucket.batch]) for group, requests in enumerate(waiting)]
        inputs, held, expected = zip(*played, strict=True)
        return Turn(case, inputs, held, expected)

    def _play(self, case: Case, group: int, requests: list[Request]) -> tuple[Inputs, torch.Tensor, Expected | None]:
        bucket, state = case.bucket, self.states[group]
        rows = sorted(torch.randperm(bucket.batch, generator=self.generator)[: len(requests)].tolist())
        placed = dict(zip(rows, requests, strict=True))
        inputs = self._inputs(bucket, placed)
        if bucket.kind == "decode":
            self._substitute(case, state, inputs, placed)
        before = state[self.seats].clone()
        if not requests:
            return inputs, before, None
        outputs, self.states[group] = self.alone.step(bucket, state, inputs)
        valid, taken = zip(*(self._advance(bucket, one, inputs, row, outputs) for row, one in placed.items()), strict=True)
        greedy = tuple(one.sampling is GREEDY for one in requests)
        nothing = torch.zeros(bucket.batch, 0)
        told = (outputs[name][rows] for name in ("tokens", "logits"))
        drafted = (outputs.get(name, nothing)[rows] for name in ("drafts", THOUGHT))
        return inputs, before, Expected(tuple(rows), valid, taken, greedy, *told, *drafted)

    def _inputs(self, bucket: Bucket, placed: Mapping[int, Request]) -> Inputs:
        logprobs, decode = self.small.max_logprobs > 0, bucket.kind == "decode"
        made = StepInputs(bucket, self.small.limits, logprobs).padding()
        made["uniform"] = torch.rand(made["uniform"].shape, generator=self.generator)
        for row, one in placed.items():
            known = self._decoding(made, row, one) if decode else self._prefilling(made, row, one)
            held = -(-min(known, self.small.limits.max_model_len) // self.small.limits.page_size)
            made["seats"][row] = one.seat
            made["page_table"][row, :held] = torch.tensor(one.pages[:held], dtype=torch.int32)
            made["write_slots"][row] = torch.tensor(one.slots[: made["write_slots"].shape[1]], dtype=torch.int32)
            for name, value in one.sampling.items():
                made[name][row] = value
            if logprobs:
                made["logprobs"][row] = row % 2
        return made

    def _prefilling(self, made: Inputs, row: int, one: Request) -> int:
        """The row's chunk; tokens of the request that there must be pages for."""
        given = one.prompt[: made["tokens"].shape[1]]
        made["tokens"][row, : len(given)] = torch.tensor(given, dtype=torch.int32)
        made["starts"][row], made["lengths"][row], made["read_slots"][row] = one.at, len(given), one.slots[0]
        if self.drafts:
            made["next_tokens"][row] = [*one.prompt, -1][len(given)]
        return one.at + len(given) + self.drafts

    def _decoding(self, made: Inputs, row: int, one: Request) -> int:
        """Where the row may start, for all that a host knows which has not read the last step yet."""
        made["base"][row] = one.at - self._below(min(one.at, self.drafts) + 1)
        return one.at + 2 * self.drafts + 1

    def _below(self, bound: int) -> int:
        return int(torch.randint(0, bound, (), generator=self.generator))

    def _substitute(self, case: Case, state: list[torch.Tensor], inputs: Inputs, placed: Mapping[int, Request]) -> None:
        """Puts drafts in the seats: what the model says up to the place that is wanted, something else there, and anything after it."""
        k, pool, wanted = self.drafts, state[self.seats], {}
        for row, one in placed.items():
            inputs["drafts"][row], wanted[row] = self._wanted(case, one)
            pool[one.seat, seats.TOKENS + 1 :] = torch.tensor(self._tokens(k), dtype=torch.int32)
        for place in range(min(max(wanted.values(), default=-1) + 1, k)):
            said = self.alone.step(case.bucket, state, inputs)[0]["tokens"]
            for row, one in placed.items():
                if place <= wanted[row]:
                    other = 0 if place < wanted[row] else 1 + self._below(self.vocab - 1)
                    pool[one.seat, seats.TOKENS + 1 + place] = (said[row, place] + other) % self.vocab

    def _wanted(self, case: Case, one: Request) -> tuple[int, int]:
        """How many drafts of a request's step are verified, and how many of its drafts are right."""
        # Every later step must find room for a token at least.
        k, room = self.drafts, self.small.limits.max_model_len - one.at - 1 - self.left
        if room < k:
            return k, room
        number, turn = divmod(self.decoded[case], k + 2)
        self.decoded[case] += 1
        return (k, turn) if turn <= k else (number % max(k, 1), k)

    def _advance(self, bucket: Bucket, one: Request, inputs: Inputs, row: int, outputs: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        """Goes on behind a step; results of it that mean something, and tokens taken in."""
        if bucket.kind == "prefill":
            valid, taken = 1, int(inputs["lengths"][row])
            one.prompt, one.written = one.prompt[taken:], one.slots[:1]
        else:
            valid = min(1 + int(inputs["drafts"][row]), self.small.limits.max_model_len - one.at)
            taken, one.written = int(outputs["counts"][row]), one.slots[:valid]
        one.at += taken
        return valid, taken
