"""The step trace: steps of several groups of requests, recorded from the unsharded small model, that any mesh must reproduce."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ...graphs.steps import request_slot
from ...graphs.steps.inputs import AXES
from ...graphs.steps.table import StepInputs, kind_of
from ...graphs.types import Bucket, Leaf
from ..agreement.poisoned_steps import LiveRow, adjust, fill_row, random_words
from ..agreement.pools import FreePlaces, PoolPlaces, fill, filled_pages, is_picture_pool, is_request_slots, request_slot_pool
from .reference_run import DRAFT_LOGITS, ReferenceRun
from .small_model import PROMPT_EXCESS, BucketCase, SmallModel, model_params

NAN = float("nan")
UNOWNED = -7
"""Content of request slots that no request owns: no legal token, position or slot."""
SAMPLED: Mapping[str, float] = {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "min_p": 0.01}
GREEDY: Mapping[str, float] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
Inputs = dict[str, torch.Tensor]


@dataclass
class TraceRequest:
    """One request while the trace is recorded.

    Attributes:
        prompt: ids that are not in the cache yet.
        own: its pages, state slots and request slot.
        sampling: sampling parameters by input name.
        cached: tokens in the cache.
        written: state slots that its last step wrote.
    """

    prompt: list[int]
    own: PoolPlaces
    sampling: Mapping[str, float]
    cached: int = 0
    written: Sequence[int] = ()

    def row(self, row: int) -> LiveRow:
        """As the row of a step behind its last one that has no token."""
        own = self.own.pages, self.written, self.own.request_slot
        return LiveRow(*own, row=row, start=self.cached, count=0, unwritten=self.own.slots[len(self.written) :])


@dataclass(frozen=True)
class ExpectedOutputs:
    """Outputs of the live rows of a group in one step.

    Attributes:
        rows: indices of the live rows in the batch.
        valid: of each row, how many of its W results count.
        taken: of each row, the tokens by which its caches grow.
        greedy: of each row, whether its tokens are the most likely ones.
        tokens: [rows, W] i32.
        logits: [rows, W, V] f32.
        drafts: [rows, k] i32.
        draft_logits: [rows, k, V] f32.
    """

    rows: tuple[int, ...]
    valid: tuple[int, ...]
    taken: tuple[int, ...]
    greedy: tuple[bool, ...]
    tokens: torch.Tensor
    logits: torch.Tensor
    drafts: torch.Tensor
    draft_logits: torch.Tensor


@dataclass(frozen=True)
class TraceStep:
    """One step of all groups.

    Attributes:
        inputs: of each group, by name.
        request_slots: each group's pool of request slots before the step.
        expected: of each group; None where it has no live row.
        before, after: each group's pools, in the order of the trace's leaves; NaN wherever nothing was written.
        rows: each group's requests after the step, those of its live rows first, with the tokens in their caches and the state slots that
            they go on from.
    """

    case: BucketCase
    inputs: tuple[Inputs, ...]
    request_slots: tuple[torch.Tensor, ...]
    expected: tuple[ExpectedOutputs | None, ...]
    before: tuple[list[torch.Tensor], ...] = ()
    after: tuple[list[torch.Tensor], ...] = ()
    rows: tuple[tuple[LiveRow, ...], ...] = ()


@dataclass(frozen=True)
class StepTrace:
    """All steps, and the state leaves of the reference."""

    steps: tuple[TraceStep, ...]
    leaves: tuple[Leaf, ...]


def record_trace(small: SmallModel, checkpoint: Mapping[str, torch.Tensor], generator: torch.Generator) -> StepTrace:
    """Runs requests through the unsharded model: their prompts in chunks where it has prefill buckets, then decode steps.

    Groups have different requests, and different numbers of them; the last of several groups idles at times. One of each samples under
    bitmasks and from adjusted logits, where the graphs take them. Live rows of a decode step
    lie at random places among padding. Before each decode step the drafts in the request slots are replaced by right ones and a wrong one,
    so that every count of accepted drafts occurs; some rows verify fewer drafts than they have. One request starts close to the end of
    its context, with a random state as after a prefill on another instance, and reaches the end.
    """
    recorder = _Recorder(small, checkpoint, generator)
    return StepTrace((*recorder.prefill(), *recorder.decode()), recorder.leaves)


class _Recorder:
    """The unsharded model with every group's requests and pools."""

    def __init__(self, small: SmallModel, checkpoint: Mapping[str, torch.Tensor], generator: torch.Generator) -> None:
        self.small, self.generator = small, generator
        self.drafts, self.vocab = small.limits.drafts, int(small.reference.config.vocab_size)
        self.reference = ReferenceRun(small.reference, small.limits, model_params(small.reference, checkpoint), small.max_logprobs)
        self.leaves = self.reference.leaves(small.cases[0].bucket)
        self.request_slots = request_slot_pool(self.leaves)
        self.chunks = [case for case in small.cases if kind_of(case.bucket).chunks]
        self.decodes = [case for case in small.cases if kind_of(case.bucket).decodes]
        self.steps_left = small.decode_steps * len(self.decodes)
        self.decoded = dict.fromkeys(self.decodes, 0)
        self.states = [self._empty_pools() for _ in range(small.mesh.axis("dp"))]
        self.groups = [self._requests(group) for group in range(len(self.states))]

    def _empty_pools(self) -> list[torch.Tensor]:
        pools = [
            torch.full(leaf.aval.shape, NAN if leaf.aval.dtype.is_floating_point else UNOWNED, dtype=leaf.aval.dtype)
            for leaf in self.leaves
        ]
        pools[self.request_slots][0] = 0
        for leaf, pool in zip(self.leaves, pools, strict=True):
            if is_picture_pool(leaf):
                pool.copy_(0.3 * torch.randn(pool.shape, generator=self.generator))
        return pools

    def _requests(self, group: int) -> list[TraceRequest]:
        limits, most = self.small.limits, self.small.requests
        chunk = max((case.bucket.q_len for case in self.chunks), default=2 * PROMPT_EXCESS)
        prompts = [chunk + min(PROMPT_EXCESS - group % 5, chunk), 1 + group % 7, chunk // 2 + group % 3]
        prompts = [min(length, chunk) for length in prompts] if self._idles(group) else prompts
        free, requests = FreePlaces(limits, self.generator), []
        for i in range(most if group % 2 == 0 and not self._idles(group) else 1):
            own = [free.pages.pop() for _ in range(limits.pages_per_request)], [free.slots.pop() for _ in range(limits.slots_per_request)]
            prompt, sampling = self._random_tokens(prompts[(i + group // 2) % 3]), SAMPLED if i == 1 else GREEDY
            request = TraceRequest(prompt, PoolPlaces(*own, free.request_slots.pop()), sampling)
            if i == 2 and self.steps_left:
                # Its context ends with the last step if it accepts one draft in all.
                self._set_random_state(self.states[group], request, limits.max_model_len - self.steps_left - 1)
            elif not self.chunks:
                self._set_random_state(self.states[group], request, len(request.prompt))
            requests.append(request)
        return requests

    def _random_tokens(self, count: int) -> list[int]:
        return [int(i) for i in torch.randint(0, self.vocab, (count,), generator=self.generator)]

    def _random_below(self, bound: int) -> int:
        return int(torch.randint(0, bound, (), generator=self.generator))

    def _set_random_state(self, state: list[torch.Tensor], request: TraceRequest, cached: int) -> None:
        """Puts a request behind a prompt of `cached` tokens, as if another instance had prefilled it and sent the state here."""
        request.cached, request.prompt, request.written = cached, [], request.own.slots[:1]
        pages = filled_pages(request.own.pages, cached, self.small.limits.page_size)
        for leaf, pool in zip(self.leaves, state, strict=True):
            fill(leaf, pool, pages, request.own.slots[:1], self.generator)
            if is_request_slots(leaf):
                offset = -self._random_below(cached) if self.small.limits.picture_rows else 0
                slot = request_slot.start(cached, self._random_tokens(1 + self.drafts), self.small.limits, offset)
                pool[request.own.request_slot] = slot

    def prefill(self) -> Iterator[TraceStep]:
        """Steps until no prompt is left, with each bucket for chunks of prompts in turn."""
        number = 0
        while cases := self.chunks:
            waiting = [[request for request in group if request.prompt] for group in self.groups]
            if not any(waiting):
                return
            if any(waiting[:-1]):
                waiting[-1] = []
            yield self._step(cases[number % len(cases)], waiting)
            number += 1

    def decode(self) -> Iterator[TraceStep]:
        """`decode_steps` steps of each decode bucket, in turn."""
        for number in range(self.small.decode_steps):
            for case in self.decodes:
                self.steps_left -= 1
                # One row is padding if the batch has room for it; requests rotate, so that one left out is in the next step.
                most = max(1, case.bucket.batch - 1)
                ready = [[*group[number % len(group) :], *group][: len(group)][:most] for group in self.groups]
                yield self._step(case, [[] if self._idles(i) and number % 2 == 0 else group for i, group in enumerate(ready)])

    def _idles(self, group: int) -> bool:
        """Whether a group has no live row while others prefill, and in every other decode step: the last of several groups."""
        return len(self.states) > 1 and group == len(self.states) - 1

    def _step(self, case: BucketCase, waiting: Sequence[list[TraceRequest]]) -> TraceStep:
        groups = [self._group_step(case, group, requests[: case.bucket.batch]) for group, requests in enumerate(waiting)]
        return TraceStep(case, *zip(*groups, strict=True))

    def _group_step(
        self, case: BucketCase, group: int, requests: list[TraceRequest]
    ) -> tuple[Inputs, torch.Tensor, ExpectedOutputs | None, list[torch.Tensor], list[torch.Tensor], tuple[LiveRow, ...]]:
        bucket, state = case.bucket, self.states[group]
        rows = sorted(torch.randperm(bucket.batch, generator=self.generator)[: len(requests)].tolist())
        live = dict(zip(rows, requests, strict=True))
        inputs = self._inputs(bucket, live)
        if kind_of(bucket).decodes:
            self._replace_drafts(case, state, inputs, live)
        request_slots = state[self.request_slots].clone()
        others = [request for request in self.groups[group] if request not in requests]
        if not requests:
            return inputs, request_slots, None, state, state, tuple(request.row(i) for i, request in enumerate(others))
        outputs, self.states[group] = self.reference.step(bucket, state, inputs)
        valid, taken = zip(*(self._advance(bucket, request, inputs, row, outputs) for row, request in live.items()), strict=True)
        greedy = tuple(request.sampling is GREEDY for request in requests)
        no_drafts = torch.zeros(bucket.batch, 0)
        results = (outputs.get(name, no_drafts)[rows] for name in ("tokens", "logits", "drafts", DRAFT_LOGITS))
        expected = ExpectedOutputs(tuple(rows), valid, taken, greedy, *results)
        owned = tuple(request.row(i) for i, request in enumerate([*requests, *others]))
        return inputs, request_slots, expected, state, self.states[group], owned

    def _inputs(self, bucket: Bucket, live: Mapping[int, TraceRequest]) -> Inputs:
        logprobs, decode = self.small.max_logprobs > 0, kind_of(bucket).decodes
        inputs = StepInputs(bucket, self.small.limits, logprobs).padding()
        inputs["uniform"] = torch.rand(inputs["uniform"].shape, generator=self.generator)
        for row, request in live.items():
            tokens, numbers = self._decode_row(request) if decode else self._prefill_row(bucket, request)
            end = request.cached + len(tokens) + (2 * self.drafts + 1 if decode else self.drafts)
            pages = request.own.pages[: -(-min(end, self.small.limits.max_model_len) // self.small.limits.page_size)]
            numbers |= {"request_slots": request.own.request_slot, **request.sampling, **({"logprobs": row % 2} if logprobs else {})}
            fill_row(inputs, row, pages, request.own.slots[: inputs["state_slots_out"].shape[1]], tokens, **numbers)
            if not decode and self.small.limits.picture_rows:
                self._set_places(inputs, row, request.cached, len(tokens))
            if request.sampling is SAMPLED and self.small.limits.bitmasks:
                # The last of the step's bitmasks.
                inputs["bitmask_rows"][row] = len(inputs["bitmask"])
                inputs["bitmask"][-1] = random_words(inputs["bitmask"][-1].shape, self.generator)
        if self.small.limits.logit_adjustments:
            adjust(inputs, [row for row, request in live.items() if request.sampling is SAMPLED], self.generator)
        return inputs

    def _set_places(self, inputs: Inputs, row: int, first: int, count: int) -> None:
        """Positions about where the tokens are, and rows of pictures in the places of some: what the host gives is what all ranks take."""
        shifts = torch.randint(0, 5, (count, AXES), generator=self.generator, dtype=torch.int32)
        inputs["positions"][row, :count] = first // 2 + torch.arange(count, dtype=torch.int32)[:, None] + shifts
        rows = self.small.limits.picture_rows
        chosen = torch.randint(1 - rows, rows, (count + 1,), generator=self.generator, dtype=torch.int32)
        inputs["picture_rows"][row, : count + 1] = chosen.clamp(min=0)

    def _prefill_row(self, bucket: Bucket, request: TraceRequest) -> tuple[list[int], dict[str, float]]:
        """The row's next chunk, and numbers by name of the input."""
        chunk = request.prompt[: bucket.q_len]
        numbers = {"num_computed_tokens": request.cached, "query_lens": len(chunk), "state_slots_in": request.own.slots[0]}
        return chunk, {**numbers, **({"next_tokens": [*request.prompt, -1][len(chunk)]} if self.drafts or kind_of(bucket).wide else {})}

    def _decode_row(self, request: TraceRequest) -> tuple[list[int], dict[str, float]]:
        """No tokens, which are in the request slot, and the smallest start that a host assumes which has not read the last step."""
        return [], {"base": request.cached - self._random_below(min(request.cached, self.drafts) + 1)}

    def _replace_drafts(self, case: BucketCase, state: list[torch.Tensor], inputs: Inputs, live: Mapping[int, TraceRequest]) -> None:
        """Replaces the drafts in the request slots: as many right ones as wanted, then a wrong one, then random tokens."""
        pool, right, most = state[self.request_slots], {}, case.bucket.q_len - 1
        for row, request in live.items():
            inputs["drafts"][row], right[row] = self._draft_counts(case, request)
            drafts = torch.tensor(self._random_tokens(self.drafts), dtype=torch.int32)
            pool[request.own.request_slot, request_slot.TOKENS + 1 :][: self.drafts] = drafts
        for place in range(min(max(right.values(), default=-1) + 1, most)):
            tokens = self.reference.step(case.bucket, state, inputs)[0]["tokens"]
            for row, request in live.items():
                if place <= right[row]:
                    offset = 0 if place < right[row] else 1 + self._random_below(self.vocab - 1)
                    pool[request.own.request_slot, request_slot.TOKENS + 1 + place] = (tokens[row, place] + offset) % self.vocab

    def _draft_counts(self, case: BucketCase, request: TraceRequest) -> tuple[int, int]:
        """How many drafts of a request the step verifies, and how many of its drafts are to be right."""
        # Each later step needs room for at least one token.
        k, room = case.bucket.q_len - 1, self.small.limits.max_model_len - request.cached - 1 - self.steps_left
        if room < k:
            return k, room
        # Of k+2 rows in a row, k+1 verify all drafts, with 0 to k right ones; the last has right ones only and verifies fewer.
        number, phase = divmod(self.decoded[case], k + 2)
        self.decoded[case] += 1
        return (k, phase) if phase <= k else (number % max(k, 1), k)

    def _advance(
        self, bucket: Bucket, request: TraceRequest, inputs: Inputs, row: int, outputs: Mapping[str, torch.Tensor]
    ) -> tuple[int, int]:
        """Moves a request behind a step; returns how many results of its row count, and by how many tokens its caches grew."""
        if kind_of(bucket).chunks:
            taken = int(inputs["query_lens"][row])
            valid = taken if kind_of(bucket).wide else 1
            request.prompt, request.written = request.prompt[taken:], request.own.slots[:1]
        else:
            valid = min(1 + int(inputs["drafts"][row]), self.small.limits.max_model_len - request.cached)
            taken, request.written = int(outputs["counts"][row]), request.own.slots[:valid]
        request.cached += taken
        return valid, taken
