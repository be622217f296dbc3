"""A device in plain Python that runs steps as the graphs do, and fails on inputs that no correct engine gives it.

Its model is a hash: the next token follows from every cached token, the recurrent state, the sampling parameters and the random
number, so a wrong page, slot, position or random number gives another token. A test sets how often drafts are right. Steps run when
they are launched or, lazily, when somebody waits for them; always in the order in which they were launched.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeVar

import numpy as np

from npucompile.graphs.steps.kind import SegmentSizes
from npucompile.graphs.types import Bucket, Limits
from npucompile.runtime.engine import Engine
from npucompile.runtime.journal import Entry, Journal
from npucompile.runtime.picture_spans import PictureInput, Span, position_offset, positions
from npucompile.runtime.request import FinishEvent, Logprobs, Request, TokenEvent
from npucompile.runtime.rng import random_number
from npucompile.runtime.scheduler.kv_cache_manager import KVCacheManager

VOCAB = 13
POISON = -(10**9)
JUNK = -7
PRIME = 1_000_003
SETTINGS = ("temperature", "top_k", "top_p", "min_p")


def fold(state: int, token: int) -> int:
    """The toy model's recurrent state after one more token."""
    return (state * 31 + token * 7 + 11) % PRIME


def fold_all(tokens: Sequence[int]) -> int:
    state = 0
    for token in tokens:
        state = fold(state, token)
    return state


def hashed(tokens: Sequence[int], state: int) -> int:
    value = 17
    for token in tokens:
        value = (value * 131 + token + 1) % PRIME
    return value * 3 + state * 5


def next_token(tokens: Sequence[int], state: int, settings: Sequence[float], u: float) -> int:
    """The token after these. Settings and random numbers are exact in float32, so rounding cannot hide a mix-up of rows."""
    temperature, top_k, top_p, min_p = settings
    offset = int(temperature * 8) + 3 * int(top_k) + int(top_p * 64) + int(min_p * 64) + (int(u * 2**24) if temperature else 0)
    return (hashed(tokens, state) + offset) % VOCAB


def logprobs_of(tokens: Sequence[int], state: int, chosen: int, most: int) -> Logprobs:
    """The toy's log probabilities of the token after these."""
    seed = hashed(tokens, state)
    top = tuple(((seed + 3 * i) % VOCAB, -((seed + i) % 32) / 8 - i) for i in range(most))
    return Logprobs(-((seed + chosen) % 64) / 8, top)


PATCH = 3
"""Values of a patch of a picture: a pixel of one frame. The device's have two frames, and 2 x 2 patches a row."""

BROKEN = 255
"""First value of a picture that the toy's tower makes no numbers of."""

LOST = -5
"""What a row of such a picture holds, or of a step that failed: requests that read it are ended before a token of theirs is sent."""


def picture(first: int, rows: int, columns: int, seed: int, *, broken: bool = False) -> PictureInput:
    """A picture that stands in the places of tokens from `first` on; equal seeds give equal ones."""
    draw = np.random.default_rng(seed)
    patches = draw.integers(0, BROKEN, (4 * rows * columns, PATCH)).astype(np.uint8)
    patches[0, 0] = BROKEN if broken else patches[0, 0]
    return PictureInput(Span(first, rows, columns), patches, (2 * rows, 2 * columns), b"%d %d %d %d" % (seed, rows, columns, broken))


def content(patches: np.ndarray) -> int:
    """What a row of these four patches is to the toy model, in the place of a token."""
    return 1000 + hashed(patches.reshape(4, 3, -1)[:, :, 0].reshape(-1).tolist(), 3) % 1000


def seen(request: Request) -> list[int]:
    """The prompt as the toy model reads it: with rows of pictures in their places."""
    prompt = list(request.prompt)
    for item in request.pictures:
        prompt[item.span.first : item.span.end] = [content(block) for block in item.patches.reshape(-1, 4, PATCH)]
    return prompt


class Visit(NamedTuple):
    """A request that comes before a step, may be cancelled before another, and may come with an order to flush the prefix cache."""

    request: Request
    arrives: int
    cancelled: int | None
    flushes: bool = False


class ReferenceRun(NamedTuple):
    """The output of a request that is generated without an engine, one token after another."""

    tokens: list[int]
    reason: str
    completion_tokens: int
    logprobs: list[Logprobs]


def reference_run(request: Request, max_model_len: int) -> ReferenceRun:
    """Generates a request without an engine and without drafts."""
    known, sampling = seen(request), request.sampling
    settings = [getattr(sampling, name) for name in SETTINGS]
    output: list[int] = []
    logprobs: list[Logprobs] = []
    while True:
        state = fold_all(known)
        token = next_token(known, state, settings, random_number(sampling.seed or 0, len(output)))
        if token in request.stop_token_ids:
            return ReferenceRun(output, "stop", len(output) + 1, logprobs)
        if request.logprobs is not None:
            logprobs.append(logprobs_of(known, state, token, request.logprobs))
        output.append(token)
        known.append(token)
        if len(output) == request.max_tokens or len(known) == max_model_len:
            return ReferenceRun(output, "length", len(output), logprobs)


def limits_of(page_size: int, num_pages: int, requests: int, max_model_len: int, drafts: int = 0) -> Limits:
    """Limits with state slots for `requests` requests."""
    return Limits(page_size, num_pages, 1 + requests * (drafts + 1), max_model_len, drafts + 1, drafts)


Inputs = Mapping[str, np.ndarray]


class Row(NamedTuple):
    """A live row of a step: its inputs, and the request that owns its request slot."""

    inputs: dict[str, Any]
    request_slot: int
    owner: Request | None


class Unowned(NamedTuple):
    """Pages and slots that no request owned when a step was launched; their contents belonged to earlier requests."""

    pages: list[int]
    slots: list[int]
    request_slots: list[int]
    picture_rows: list[int]


@dataclass
class Memory:
    """The pools of one dp group, and the steps that read and write them.

    Attributes:
        right: probability that a draft is right.
        max_logprobs, recurrent: as of an executor; a model without recurrent states depends on the cached tokens alone.
        manager: of the engine; without it the owners of pages and slots are unknown.
        rows: live rows by bucket name, of steps that did not fail.
        accepted: rows of decode steps by number of accepted drafts.
        broken: request slots of requests whose step failed, and these; what the step was to write may hold anything.
        given_back: how many pages and slots were.
    """

    limits: Limits
    right: float = 0.5
    max_logprobs: int = 0
    recurrent: bool = True
    draw: random.Random = field(default_factory=lambda: random.Random(5))
    manager: KVCacheManager | None = None
    requests: dict[str, Request] = field(default_factory=dict)
    rows: Counter[str] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    broken: dict[int, Request | None] = field(default_factory=dict)
    slots_of: dict[int, list[int]] = field(default_factory=dict)
    given_back: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        limits, Q = self.limits, self.limits.drafts + 1
        self.pages = np.full((limits.num_pages, limits.page_size), POISON, np.int64)
        self.heads = np.full((limits.num_pages, limits.page_size), POISON, np.int64)
        self.slots = np.full(limits.num_slots, POISON, np.int64)
        self.tokens = np.full((limits.num_request_slots, Q), POISON, np.int64)
        self.num_computed_tokens = np.full(limits.num_request_slots, POISON, np.int64)
        self.chosen = np.full(limits.num_request_slots, POISON, np.int64)
        self.pictures = np.full(limits.picture_rows, POISON, np.int64)
        self.encoded = 0

    # When a step is launched.

    def unowned(self) -> Unowned:
        if self.manager is None:
            return Unowned([], [], [], [])
        pools = (self.manager.pages, self.manager.state_slots, self.manager.request_slots)
        rows = list(self.manager.pictures._free) if self.manager.pictures else []
        return Unowned(*([number for number, owner in enumerate(pool._owner) if owner is None] for pool in pools), rows)

    def live_rows(self, inputs: Inputs) -> list[Row]:
        """The live rows; every input of the others must be that of padding."""
        rows = []
        if "grids" in inputs:
            for i, grid in enumerate(inputs["grids"].tolist()):
                segment = {name: array[i].copy() for name, array in inputs.items()}
                count = grid[0] * grid[1]
                assert not segment["patches"][count:].any()
                assert not segment["picture_rows"][count // 4 :].any()
                assert (segment["picture_rows"][: count // 4] > 0).all()
                rows += [Row(segment, 0, None)] if count else []
            return rows
        for i, request_slot in enumerate(inputs["request_slots"].tolist()):
            row_inputs = {name: array[i].copy() for name, array in inputs.items()}
            if request_slot:
                name = self.manager.request_slots._owner[request_slot] if self.manager else None
                rows.append(Row(row_inputs, request_slot, self.requests.get(name or "")))
                continue
            idle = {"top_p": 1, "next_tokens": -1}
            assert all(np.all(value == idle.get(name, 0)) for name, value in row_inputs.items()), f"padding holds {row_inputs}"
        return rows

    def lose(self, numbers: Mapping[str, Sequence[int]]) -> None:
        """Loses what pages and slots hold that no request owns."""
        unowned = self.unowned()
        assert set(numbers["pages"]) <= set(unowned.pages), "pages are given back that have an owner"
        assert set(numbers["slots"]) <= set(unowned.slots), "slots are given back that have an owner"
        self.pages[list(numbers["pages"])] = self.heads[list(numbers["pages"])] = POISON
        self.slots[list(numbers["slots"])] = POISON
        self.given_back.update({axis: len(of) for axis, of in numbers.items()})

    # When it runs.

    def run(self, bucket: Bucket, rows: Sequence[Row], unowned: Unowned, counted: str) -> dict[str, np.ndarray]:
        """Runs a step: all rows read before any row writes, as one graph does."""
        # What is given up with the launch of the step that reads it is written by later steps only.
        read = {int(row.inputs["state_slots_in"]) for row in rows if bucket.kind == "prefill"}
        unowned = unowned._replace(slots=[slot for slot in unowned.slots if slot not in read])
        for pools, numbers in (
            ((self.pages, self.heads), unowned.pages),
            ((self.slots,), unowned.slots),
            ((self.tokens, self.num_computed_tokens, self.chosen), unowned.request_slots),
            ((self.pictures,), unowned.picture_rows),
        ):
            for pool in pools:
                pool[numbers] = POISON
        self.writes: list[tuple[tuple[Any, ...], np.ndarray, Any, int]] = []
        if bucket.kind == "encode":
            self.rows[counted] += len(rows)
            return self.encode(bucket, rows)
        B, W, k, n = bucket.batch, bucket.q_len if bucket.kind == "decode" else 1, self.limits.drafts, self.max_logprobs
        outputs: dict[str, np.ndarray] = {"tokens": np.full((B, W), JUNK, np.int32)}
        if bucket.kind == "decode":
            outputs["counts"] = np.zeros(B, np.int32)
        if k:
            outputs["drafts"] = np.full((B, k), JUNK, np.int32)
        if n:
            outputs["chosen_logprobs"] = np.full((B, W), np.nan, np.float32)
            outputs["top_ids"] = np.full((B, W, n), JUNK, np.int32)
            outputs["top_logprobs"] = np.full((B, W, n), np.nan, np.float32)
        for i, row in enumerate(rows):
            # A request that begins may begin after tokens that are cached.
            begins = bucket.kind == "prefill" and (
                row.inputs["num_computed_tokens"] == 0 or self.broken.get(row.request_slot) is not row.owner
            )
            if begins:
                self.broken.pop(row.request_slot, None)
            if row.request_slot in self.broken:
                # A step of this request failed, so the engine must end it.
                continue
            (self.decode if bucket.kind == "decode" else self.prefill)(row, i, outputs)
        targets = [target for target, *_ in self.writes]
        assert len(set(targets)) == len(targets), f"two rows write the same place: {targets}"
        for _, pool, where, value in self.writes:
            pool[where] = value
        self.rows[counted] += len(rows)
        return outputs

    def fail(self, rows: Sequence[Row]) -> None:
        """Leaves the pools as a step that failed half way would."""
        for row in rows:
            if "grids" in row.inputs:
                self.pictures[row.inputs["picture_rows"]] = LOST
                continue
            # What is full is only read.
            start = row.inputs.get("num_computed_tokens", row.inputs.get("base"))
            written = row.inputs["page_table"][int(start) // self.limits.page_size :]
            self.pages[written] = self.heads[written] = POISON
            self.slots[row.inputs["state_slots_out"]] = POISON
            self.broken[row.request_slot] = row.owner

    def encode(self, bucket: Bucket, rows: Sequence[Row]) -> dict[str, np.ndarray]:
        finite = np.ones(bucket.batch, np.int32)
        for i, row in enumerate(rows):
            patches, count = row.inputs["patches"], int(np.prod(row.inputs["grids"]))
            # Both frames of a still picture are the same.
            by_frame = patches[:count].reshape(count, 3, 2, -1)
            assert (by_frame[:, :, 0] == by_frame[:, :, 1]).all()
            finite[i] = patches[0, 0] != BROKEN
            for place, number in enumerate(row.inputs["picture_rows"][: count // 4].tolist()):
                self.put("picture", self.pictures, number, content(patches[4 * place : 4 * place + 4]) if finite[i] else LOST)
        targets = [target for target, *_ in self.writes]
        assert len(set(targets)) == len(targets), f"two segments write the same row: {targets}"
        for _, pool, where, value in self.writes:
            pool[where] = value
        self.encoded += len(rows)
        return {"finite": finite}

    def with_pictures(self, row: Row, start: int, new: list[int], behind: int) -> tuple[list[int], int]:
        """The tokens of a chunk and the one behind it as the model reads them; checks their positions."""
        inputs, length = row.inputs, len(new)
        if "picture_rows" not in inputs:
            return new, behind
        numbers = inputs["picture_rows"][: length + 1].tolist()
        assert not inputs["picture_rows"][length + 1 :].any()
        assert not inputs["positions"][length:].any()
        for number in numbers:
            assert not number or self.pictures[number] != POISON, f"row {number} is read before it was written"
        if row.owner is not None:
            spans = [item.span for item in row.owner.pictures]
            after = np.arange(len(row.owner.prompt), start + length)[:, None] + position_offset(spans)
            expected = np.concatenate([positions(len(row.owner.prompt), spans), np.repeat(after, 3, 1)])[start : start + length]
            assert (inputs["positions"][:length] == expected).all(), f"{row.owner.id!r} from {start} has {inputs['positions'][:length]}"
        read = [int(self.pictures[number]) if number else token for number, token in zip(numbers, [*new, behind], strict=True)]
        return read[:-1], read[-1]

    def prefill(self, row: Row, i: int, outputs: dict[str, np.ndarray]) -> None:
        inputs, request_slot = row.inputs, row.request_slot
        start, length, table = int(inputs["num_computed_tokens"]), int(inputs["query_lens"]), inputs["page_table"]
        new, behind = self.with_pictures(row, start, inputs["tokens"][:length].tolist(), int(inputs.get("next_tokens", -1)))
        assert length > 0
        assert not inputs["tokens"][length:].any()
        tokens = [self.cached(self.pages, table, position) for position in range(start)]
        first, (slot,) = int(inputs["state_slots_in"]), inputs["state_slots_out"].tolist()
        assert first > 0
        assert slot > 0
        # That of the last chunk is where decode steps begin.
        self.slots_of[request_slot] = [slot]
        state = 0 if start == 0 else self.state(first) if self.recurrent else fold_all(tokens)
        for offset, token in enumerate(new):
            self.write(self.pages, table, start + offset, token)
            tokens.append(token)
            state = fold(state, token)
        self.put("slot", self.slots, slot, state)
        following, end = behind, len(tokens)
        last = int(inputs.get("next_tokens", -1)) < 0
        if last and self.limits.drafts:
            # Without drafts the inputs do not show which chunk is the last.
            self.check_uniform(row, float(inputs["uniform"][0]), end)
        settings = [float(inputs[name]) for name in SETTINGS]
        sampled = next_token(tokens, state, settings, float(inputs["uniform"][0]))
        self.emit(outputs, row, i, 0, tokens, state, sampled)
        following = sampled if last else following
        for offset, token in enumerate([*new[1:], following] if self.limits.drafts else ()):
            self.write(self.heads, table, start + offset, token)
        self.fill_slot(row, i, outputs, tokens, following, 0)

    def decode(self, row: Row, i: int, outputs: dict[str, np.ndarray]) -> None:
        inputs, request_slot, Q = row.inputs, row.request_slot, self.limits.drafts + 1
        table, slots = inputs["page_table"], inputs["state_slots_out"].tolist()
        start, chosen, base = int(self.num_computed_tokens[request_slot]), int(self.chosen[request_slot]), int(inputs["base"])
        assert start != POISON, f"request slot {request_slot} is read before it was written"
        assert base <= start <= base + Q - 1, f"the step starts at {start}; {base} to {base + Q - 1} was said"
        assert 0 <= int(inputs["drafts"]) < Q
        assert all(slots)
        assert self.slots_of[request_slot] in (slots, slots[:1]), (
            f"the slots of request slot {request_slot} are {slots}, and were {self.slots_of[request_slot]}"
        )
        self.slots_of[request_slot] = slots
        length = min(1 + int(inputs["drafts"]), self.limits.max_model_len - start)
        if length <= 0:
            return
        tokens = [self.cached(self.pages, table, position) for position in range(start)]
        candidates = self.tokens[request_slot].tolist()
        state = self.state(slots[chosen]) if self.recurrent else fold_all(tokens)
        settings, sampled, going = [float(inputs[name]) for name in SETTINGS], [], True
        accepted: list[int] = []
        for j in range(length):
            self.write(self.pages, table, start + j, candidates[j])
            tokens.append(candidates[j])
            state = fold(state, candidates[j])
            self.put("slot", self.slots, slots[j], state)
            u = float(inputs["uniform"][start - base + j])
            self.check_uniform(row, u, start + j + 1)
            sampled.append(next_token(tokens, state, settings, u))
            self.emit(outputs, row, i, j, tokens, state, sampled[-1])
            if going:
                accepted.append(sampled[-1])
            going = going and j + 1 < length and candidates[j + 1] == sampled[-1]
        count = len(accepted)
        outputs["counts"][i] = count
        self.accepted[count - 1] += 1
        for offset, token in enumerate(accepted if self.limits.drafts else ()):
            self.write(self.heads, table, start + offset, token)
        self.fill_slot(row, i, outputs, tokens[: start + count], accepted[-1], count - 1)

    def fill_slot(self, row: Row, i: int, outputs: dict[str, np.ndarray], tokens: list[int], last: int, chosen: int) -> None:
        """Drafts after `last`, the token that follows the cached ones, and fills the request slot."""
        end, k = len(tokens), self.limits.drafts
        if k:
            # The draft head has computed every token of the request, each beside the one before it.
            written = {target: value for target, _, _, value in self.writes}
            for position in range(end):
                place = self.place(row.inputs["page_table"], position)
                cached = written.get((id(self.heads), *place), self.heads[place])
                assert cached == (*tokens, last)[position + 1], f"the head's cache holds {cached} at {position} of {(*tokens, last)}"
        drafts = self.drafts(row, [*tokens, last])
        for offset, token in enumerate(drafts):
            if end + offset < self.limits.max_model_len:
                self.write(self.heads, row.inputs["page_table"], end + offset, token)
        if k:
            outputs["drafts"][i] = drafts
        self.put("request_slot", self.tokens, row.request_slot, [last, *drafts])
        self.put("start", self.num_computed_tokens, row.request_slot, end)
        self.put("chosen", self.chosen, row.request_slot, chosen)

    def drafts(self, row: Row, known: list[int]) -> list[int]:
        """All drafts, each right with probability `right`, computed with the request's random numbers, which are not in the inputs."""
        drafts = []
        for _ in range(self.limits.drafts):
            draft = self.draw.randrange(VOCAB)
            if row.owner is not None and self.draw.random() < self.right:
                settings = [float(row.inputs[name]) for name in SETTINGS]
                u = random_number(row.owner.sampling.seed or 0, len(known) - len(row.owner.prompt))
                draft = next_token(known, fold_all(known), settings, u)
            drafts.append(draft)
            known = [*known, draft]
        return drafts

    def emit(self, outputs: dict[str, np.ndarray], row: Row, i: int, j: int, tokens: list[int], state: int, sampled: int) -> None:
        outputs["tokens"][i, j] = sampled
        if self.max_logprobs and row.inputs["logprobs"]:
            logprobs = logprobs_of(tokens, state, sampled, self.max_logprobs)
            outputs["chosen_logprobs"][i, j] = logprobs.logprob
            outputs["top_ids"][i, j] = [token for token, _ in logprobs.top]
            outputs["top_logprobs"][i, j] = [value for _, value in logprobs.top]

    def check_uniform(self, row: Row, u: float, position: int) -> None:
        if row.owner is None:
            return
        sampling = row.owner.sampling
        right = random_number(sampling.seed or 0, position - len(row.owner.prompt)) if sampling.temperature else 0.0
        assert u == right, f"token {position} of {row.owner.id!r} is picked with {u}; its random number is {right}"

    def place(self, table: np.ndarray, position: int) -> tuple[int, int]:
        page = int(table[position // self.limits.page_size])
        assert page > 0, f"position {position} has no page"
        return page, position % self.limits.page_size

    def cached(self, pool: np.ndarray, table: np.ndarray, position: int) -> int:
        token = int(pool[self.place(table, position)])
        assert token != POISON, f"position {position} is read before it was written"
        return token

    def state(self, slot: int) -> int:
        state = int(self.slots[slot])
        assert state != POISON, f"slot {slot} is read before it was written"
        return state

    def write(self, pool: np.ndarray, table: np.ndarray, position: int, token: int) -> None:
        place = self.place(table, position)
        self.writes.append(((id(pool), *place), pool, place, token))

    def put(self, what: str, pool: np.ndarray, number: int, value: Any) -> None:
        self.writes.append(((what, number), pool, number, value))


class Failed(RuntimeError):
    """Raised by a step that a test makes fail."""


@dataclass
class ToyStep:
    """A launched step, which may not have run yet."""

    device: ToyDevice
    number: int
    runs: Callable[[], list[dict[str, np.ndarray]]]

    def run(self) -> None:
        try:
            self.outputs: list[dict[str, np.ndarray]] | Failed = self.runs()
        except Failed as error:
            self.outputs = error

    def result(self) -> list[dict[str, np.ndarray]]:
        self.device.log.append(("result", self.number))
        self.device.run_up_to(self.number)
        if isinstance(self.outputs, Failed):
            raise self.outputs
        return self.outputs


@dataclass
class ToyDevice:
    """An executor over one or several dp groups, whose caller may run ahead.

    Attributes:
        lazy: a step runs when somebody waits for its result, and not when it is launched.
        fail_at: numbers of the steps, from 1, that fail when they run.
        refuse_at: numbers of those that cannot be launched.
        log: ("launch", "refused" or "result", number of the step) in order.
        on_run: called before every step that runs.
    """

    limits: Limits
    buckets: tuple[Bucket, ...]
    groups: int = 1
    run_ahead: int = 1
    max_logprobs: int = 0
    max_ranked: int = 0
    recurrent: bool = True
    fixed_tokens: float | None = None
    right: float = 0.5
    lazy: bool = False
    fail_at: frozenset[int] = frozenset()
    refuse_at: frozenset[int] = frozenset()
    on_run: Callable[[], None] = lambda: None
    vocab_size: int = VOCAB
    segments: SegmentSizes | None = None
    any_size: frozenset[str] = frozenset()
    backends: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[Bucket, str] = field(default_factory=dict)
    refreshes: int = 0
    log: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if any(bucket.kind == "encode" for bucket in self.buckets):
            self.segments = SegmentSizes(2 * PATCH, 4)
        self.memories = [
            Memory(self.limits, self.right, self.max_logprobs, self.recurrent, random.Random(group)) for group in range(self.groups)
        ]
        self.steps: list[ToyStep] = []
        self.num_run = 0

    @property
    def runs(self) -> int:
        """Steps launched, or refused."""
        return len(self.steps)

    @property
    def rows(self) -> Counter[str]:
        """Live rows by bucket name, of steps that did not fail."""
        return sum((memory.rows for memory in self.memories), Counter())

    def attach(self, engine: Engine) -> None:
        """Gives the device this engine's KV cache managers, which know the owners of pages and slots."""
        for memory, manager in zip(self.memories, engine.stepper.cache_managers, strict=True):
            memory.manager = manager

    def register(self, request: Request) -> None:
        """Gives the device a request, with which it checks random numbers and computes right drafts."""
        for memory in self.memories:
            memory.requests[request.id] = request

    def launch(self, bucket: Bucket, inputs: Sequence[Inputs]) -> ToyStep:
        assert bucket in self.buckets
        shape = self._shape(bucket, inputs[0]) if bucket.kind in self.any_size else bucket
        number = len(self.steps) + 1
        self.log.append(("launch" if number not in self.refuse_at else "refused", number))
        parts = [(memory, memory.live_rows(arrays), memory.unowned()) for memory, arrays in zip(self.memories, inputs, strict=True)]

        def run() -> list[dict[str, np.ndarray]]:
            self.on_run()
            if number in self.fail_at | self.refuse_at:
                for memory, rows, _ in parts:
                    memory.fail(rows)
                raise Failed(f"run {number} was told to fail")
            return [memory.run(shape, rows, unowned, bucket.name) for memory, rows, unowned in parts]

        self.steps.append(ToyStep(self, number, run))
        if number in self.refuse_at:
            self.run_up_to(number)
            raise Failed(f"run {number} was told to fail")
        if not self.lazy:
            self.run_up_to(number)
        return self.steps[-1]

    def _shape(self, bucket: Bucket, inputs: Inputs) -> Bucket:
        """Rows and tokens of a step, none of which is padding but by unequal chunks."""
        rows, width = len(inputs["request_slots"]), inputs["tokens"].shape[1] if bucket.kind == "prefill" else bucket.q_len
        assert rows * width <= bucket.tokens
        assert all(inputs["request_slots"])
        assert bucket.kind == "decode" or width == max(inputs["query_lens"])
        return Bucket(bucket.kind, rows, width)

    def run_up_to(self, number: int) -> None:
        """Runs the launched steps up to this one, in order."""
        while self.num_run < number:
            self.num_run += 1
            self.steps[self.num_run - 1].run()

    def refresh(self) -> bool:
        self.refreshes += 1
        return True

    def give_back(self, numbers: Sequence[Mapping[str, Sequence[int]]]) -> None:
        """What is given back is lost, as it is on a machine."""
        assert self.num_run == len(self.steps), "memory is given back while steps are in flight"
        for memory, own in zip(self.memories, numbers, strict=True):
            memory.lose(own)

    def compiles(self) -> int:
        return 0

    def check_order(self, run_ahead: int) -> None:
        """Results are read in order, and no step is launched while more than `run_ahead` are in flight."""
        in_flight: list[int] = []
        for what, number in self.log:
            if what == "launch":
                assert len(in_flight) <= run_ahead, f"step {number} is launched while {in_flight} are in flight"
                in_flight.append(number)
            elif what == "result":
                assert in_flight.pop(0) == number
        assert not in_flight


class Collector:
    """A sink that checks the protocol: tokens, then one end, then nothing."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[Logprobs] = []
        self.events: list[TokenEvent] = []
        self.end: Any = None

    def __call__(self, event: TokenEvent | FinishEvent) -> None:
        assert self.end is None, f"{event} after the end"
        if isinstance(event, FinishEvent):
            self.end = event
            return
        assert event.token_ids or event.prompt_logprobs
        assert len(event.logprobs) in (0, len(event.token_ids))
        self.events.append(event)
        self.tokens += event.token_ids
        self.logprobs += event.logprobs


class Clock:
    """A clock that advances by one second whenever it is read."""

    def __init__(self) -> None:
        self._ticks = itertools.count(1)

    def __call__(self) -> float:
        return float(next(self._ticks))


class Serving(NamedTuple):
    """An engine, and the device under it."""

    engine: Engine
    device: ToyDevice

    def submit(self, request: Request, sink: Callable[[Any], None] | None = None) -> Any:
        """Submits a request and returns its sink."""
        sink = sink or Collector()
        self.device.register(request)
        self.engine.submit(request, sink)
        return sink

    def drain(self, most: int = 100_000) -> None:
        """Steps until the engine is idle."""
        for _ in range(most):
            if not self.engine.step():
                return
        raise AssertionError(f"the engine is not idle after {most} steps")


S = TypeVar("S", bound=Collector)


def finished(engine: Engine, requests: Sequence[Request], sink: Callable[[], S] = Collector) -> list[S]:  # type: ignore[assignment]
    """The sink of each request, when all have ended."""
    sinks = [sink() for _ in requests]
    for request, own in zip(requests, sinks, strict=True):
        engine.submit(request, own)
    while engine.step():
        engine.stepper.check()
    engine.stepper.check()
    return sinks


class Played(NamedTuple):
    """What served visits, the sink of each, and the engine's journal."""

    served: Serving
    sinks: list[Collector]
    entries: list[Entry]


def played(visits: Sequence[Visit], device: Mapping[str, Any]) -> Played:
    """Serves visits to their ends; `device` are options of `serving`."""
    served, entries = serving(**device), list[Entry]()
    served.engine.stepper.journal = Journal(entries.append)
    sinks: dict[str, Collector] = {}
    for now in range(35):
        for visit in visits:
            if visit.arrives == now:
                sinks[visit.request.id] = served.submit(visit.request)
                if visit.flushes:
                    served.engine.flush_prefix_cache()
            if visit.cancelled == now:
                served.engine.cancel(visit.request.id)
        served.engine.step()
        served.engine.stepper.check()
    served.drain()
    return Played(served, [sinks[visit.request.id] for visit in visits], entries)


def buckets_of(drafts: int, prefill: Sequence[int] = (3, 8), decode: Sequence[int] = (2, 4)) -> tuple[Bucket, ...]:
    """Prefill buckets by number of tokens, decode buckets by number of rows."""
    return (*(Bucket("prefill", 1, size) for size in prefill), *(Bucket("decode", rows, drafts + 1) for rows in decode))


def serving(limits: Limits | None = None, buckets: Sequence[Bucket] | None = None, *, drafts: int = 0, **options: Any) -> Serving:
    """An engine over a toy device; by default with slots for eight requests of 32 tokens, and pages for two.

    Args:
        drafts: of the default limits and buckets.
        options: attributes of the ToyDevice, and settings of the engine, `run_ahead` among them.
    """
    limits = limits or limits_of(4, 17, 8, 32, drafts)
    of_device = {name: options.pop(name) for name in {*options} & {field.name for field in fields(ToyDevice)} - {"run_ahead"}}
    toy = ToyDevice(limits, tuple(buckets or buckets_of(limits.drafts)), **of_device)
    engine = Engine(toy, **{"clock": Clock()} | options)
    toy.attach(engine)
    return Serving(engine, toy)
