"""A device in plain Python that does what a decode graph does with seats, and complains about whatever no correct engine asks of it.

Its model is a hash: the next token follows from every cached token, the recurrent state, how the request samples and its random number,
so a token that comes from a wrong page, slot, seat, position or random number is another token. Drafts are right as often as a test
wants. Steps run when they are launched or, lazily, when somebody waits for them; always in the order in which they were launched.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from npucompile.graphs.types import Bucket, Limits
from npucompile.runtime.engine import Engine
from npucompile.runtime.request import FinishEvent, Request, TokenEvent, TokenLogprobs
from npucompile.runtime.rng import uniform

VOCAB = 13
POISON = -(10**9)
JUNK = -7
PRIME = 1_000_003
SETTINGS = ("temperature", "top_k", "top_p", "min_p")


def fold(state: int, token: int) -> int:
    """The toy's recurrent state after one more token."""
    return (state * 31 + token * 7 + 11) % PRIME


def fold_all(tokens: Sequence[int]) -> int:
    state = 0
    for token in tokens:
        state = fold(state, token)
    return state


def mixed(tokens: Sequence[int], state: int) -> int:
    seen = 17
    for token in tokens:
        seen = (seen * 131 + token + 1) % PRIME
    return seen * 3 + state * 5


def next_token(tokens: Sequence[int], state: int, how: Sequence[float], u: float) -> int:
    """The token after these. Dyadic settings and 24-bit numbers are exact in float32, so no mix-up of rows hides in rounding."""
    temperature, top_k, top_p, min_p = how
    settings = int(temperature * 8) + 3 * int(top_k) + int(top_p * 64) + int(min_p * 64) + (int(u * 2**24) if temperature else 0)
    return (mixed(tokens, state) + settings) % VOCAB


def told(tokens: Sequence[int], state: int, chosen: int, most: int) -> TokenLogprobs:
    """The toy's log probabilities of the token after these."""
    seed = mixed(tokens, state)
    top = tuple(((seed + 3 * i) % VOCAB, -((seed + i) % 32) / 8 - i) for i in range(most))
    return TokenLogprobs(-((seed + chosen) % 64) / 8, top)


class Alone(NamedTuple):
    """What a request gets by itself, one token after another: what is shown of it, and how it ends."""

    tokens: list[int]
    reason: str
    completion_tokens: int
    logprobs: list[TokenLogprobs]


def alone(request: Request, max_model_len: int) -> Alone:
    """A request generated without an engine and without drafts."""
    known, sampling = list(request.prompt), request.sampling
    how = [getattr(sampling, name) for name in SETTINGS]
    shown: list[int] = []
    logprobs: list[TokenLogprobs] = []
    while True:
        state = fold_all(known)
        token = next_token(known, state, how, uniform(sampling.seed or 0, len(shown)))
        if token in request.stop_token_ids:
            return Alone(shown, "stop", len(shown) + 1, logprobs)
        if request.logprobs is not None:
            logprobs.append(told(known, state, token, request.logprobs))
        shown.append(token)
        known.append(token)
        if len(shown) == request.max_tokens or len(known) == max_model_len:
            return Alone(shown, "length", len(shown), logprobs)


def limits_of(page_size: int, num_pages: int, requests: int, max_model_len: int, drafts: int = 0) -> Limits:
    """Limits with slots for so many requests."""
    return Limits(page_size, num_pages, 1 + requests * (drafts + 1), max_model_len, drafts + 1, drafts)


Inputs = Mapping[str, np.ndarray]


class Row(NamedTuple):
    """A row of a step as the device finds it: what was given, and who holds its seat."""

    given: dict[str, Any]
    seat: int
    owner: Request | None


class Dead(NamedTuple):
    """What nobody owned when a step was launched: whatever is read there was left by somebody else."""

    pages: list[int]
    slots: list[int]
    seats: list[int]


@dataclass
class Memory:
    """The pools of one dp group, and what its steps do with them.

    Attributes:
        right: how likely each draft is the right one.
        most_logprobs: as an executor's `max_logprobs`.
        holdings: the engine's, to tell who owns what; without them nothing is known of that.
        rows: live rows by bucket name, of steps that did not fail.
        accepted: how many rows of decode steps had so many drafts accepted.
        broken: seats of requests whose step failed: what is left of them is not to be relied upon.
    """

    limits: Limits
    right: float = 0.5
    most_logprobs: int = 0
    draw: random.Random = field(default_factory=lambda: random.Random(5))
    holdings: Any = None
    requests: dict[str, Request] = field(default_factory=dict)
    rows: Counter[str] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    broken: set[int] = field(default_factory=set)
    slots_of: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limits, Q = self.limits, self.limits.drafts + 1
        self.pages = np.full((limits.num_pages, limits.page_size), POISON, np.int64)
        self.heads = np.full((limits.num_pages, limits.page_size), POISON, np.int64)
        self.slots = np.full(limits.num_slots, POISON, np.int64)
        self.tokens = np.full((limits.num_seats, Q), POISON, np.int64)
        self.starts = np.full(limits.num_seats, POISON, np.int64)
        self.chosen = np.full(limits.num_seats, POISON, np.int64)

    # When a step is launched.

    def dead(self) -> Dead:
        if self.holdings is None:
            return Dead([], [], [])
        pools = (self.holdings.pages, self.holdings.slots, self.holdings.seats)
        return Dead(*(sorted(set(range(pool.size)).difference(*(pool.owned(owner) for owner in pool.owners()))) for pool in pools))

    def found(self, bucket: Bucket, inputs: Inputs) -> list[Row]:
        """The live rows; all others must be padding to the last number."""
        rows = []
        for i, seat in enumerate(inputs["seats"].tolist()):
            given = {name: array[i].copy() for name, array in inputs.items()}
            if seat:
                owned = self.holdings.seats if self.holdings else None
                name = next((owner for owner in owned.owners() if seat in owned.owned(owner)), "") if owned else ""
                rows.append(Row(given, seat, self.requests.get(name)))
                continue
            idle = {"top_p": 1, "next_tokens": -1}
            assert all(np.all(value == idle.get(name, 0)) for name, value in given.items()), f"padding holds {given}"
        return rows

    # When it runs.

    def run(self, bucket: Bucket, rows: Sequence[Row], dead: Dead) -> dict[str, np.ndarray]:
        """Runs a step: all rows read before any row writes, as one graph does."""
        for pools, numbers in (
            ((self.pages, self.heads), dead.pages),
            ((self.slots,), dead.slots),
            ((self.tokens, self.starts, self.chosen), dead.seats),
        ):
            for pool in pools:
                pool[numbers] = POISON
        self.writes: list[tuple[tuple[Any, ...], np.ndarray, Any, int]] = []
        B, W, k, n = bucket.batch, bucket.q_len if bucket.kind == "decode" else 1, self.limits.drafts, self.most_logprobs
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
            if bucket.kind == "prefill" and row.given["starts"] == 0:
                self.broken.discard(row.seat)
                self.slots_of.pop(row.seat, None)
            if row.seat in self.broken:
                # Whatever a failed step left there, somebody must have given up on this request.
                continue
            (self.decode if bucket.kind == "decode" else self.prefill)(row, i, outputs)
        targets = [target for target, *_ in self.writes]
        assert len(set(targets)) == len(targets), f"two rows write the same place: {targets}"
        for _, pool, where, value in self.writes:
            pool[where] = value
        self.rows[bucket.name] += len(rows)
        return outputs

    def fail(self, rows: Sequence[Row]) -> None:
        """What a step leaves that failed half way."""
        for row in rows:
            self.pages[row.given["page_table"]] = POISON
            self.heads[row.given["page_table"]] = POISON
            self.slots[row.given["write_slots"]] = POISON
            self.broken.add(row.seat)

    def prefill(self, row: Row, i: int, outputs: dict[str, np.ndarray]) -> None:
        given, seat = row.given, row.seat
        start, length, table = int(given["starts"]), int(given["lengths"]), given["page_table"]
        new = given["tokens"][:length].tolist()
        assert length > 0
        assert not given["tokens"][length:].any()
        tokens = [self.cached(self.pages, table, position) for position in range(start)]
        slot = int(given["read_slots"])
        assert slot > 0
        assert given["write_slots"].tolist() == [slot]
        assert self.slots_of.setdefault(seat, [slot])[0] == slot, "the slot of a request changes while it is prefilled"
        state = 0 if start == 0 else self.state(slot)
        for offset, token in enumerate(new):
            self.write(self.pages, table, start + offset, token)
            tokens.append(token)
            state = fold(state, token)
        self.put("slot", self.slots, slot, state)
        following = int(given.get("next_tokens", -1))
        end = len(tokens)
        last = following < 0
        if last and self.limits.drafts:
            # Without drafts nothing tells the last chunk from the others.
            self.check_uniform(row, float(given["uniform"][0]), end)
        how = [float(given[name]) for name in SETTINGS]
        sampled = next_token(tokens, state, how, float(given["uniform"][0]))
        self.say(outputs, row, i, 0, tokens, state, sampled)
        following = sampled if last else following
        for offset, token in enumerate([*new[1:], following] if self.limits.drafts else ()):
            self.write(self.heads, table, start + offset, token)
        self.leave(row, i, outputs, tokens, following, 0)

    def decode(self, row: Row, i: int, outputs: dict[str, np.ndarray]) -> None:
        given, seat, Q = row.given, row.seat, self.limits.drafts + 1
        table, slots = given["page_table"], given["write_slots"].tolist()
        start, chosen, base = int(self.starts[seat]), int(self.chosen[seat]), int(given["base"])
        assert start != POISON, f"seat {seat} is read before it was written"
        assert base <= start <= base + Q - 1, f"the step starts at {start}; {base} to {base + Q - 1} was said"
        assert 0 <= int(given["drafts"]) < Q
        assert all(slots)
        assert self.slots_of[seat] in (slots, slots[:1]), f"the slots of seat {seat} are {slots}, and were {self.slots_of[seat]}"
        self.slots_of[seat] = slots
        length = min(1 + int(given["drafts"]), self.limits.max_model_len - start)
        if length <= 0:
            return
        tokens = [self.cached(self.pages, table, position) for position in range(start)]
        state, candidates = self.state(slots[chosen]), self.tokens[seat].tolist()
        how, sampled, going = [float(given[name]) for name in SETTINGS], [], True
        accepted: list[int] = []
        for j in range(length):
            self.write(self.pages, table, start + j, candidates[j])
            tokens.append(candidates[j])
            state = fold(state, candidates[j])
            self.put("slot", self.slots, slots[j], state)
            u = float(given["uniform"][start - base + j])
            self.check_uniform(row, u, start + j + 1)
            sampled.append(next_token(tokens, state, how, u))
            self.say(outputs, row, i, j, tokens, state, sampled[-1])
            if going:
                accepted.append(sampled[-1])
            going = going and j + 1 < length and candidates[j + 1] == sampled[-1]
        count = len(accepted)
        outputs["counts"][i] = count
        self.accepted[count - 1] += 1
        for offset, token in enumerate(accepted if self.limits.drafts else ()):
            self.write(self.heads, table, start + offset, token)
        self.leave(row, i, outputs, tokens[: start + count], accepted[-1], count - 1)

    def leave(self, row: Row, i: int, outputs: dict[str, np.ndarray], tokens: list[int], last: int, chosen: int) -> None:
        """Drafts after `last`, the token that follows those cached, and fills the seat."""
        end, k = len(tokens), self.limits.drafts
        if k:
            # The head has seen every token of the request, each beside the one before it.
            written = {target: value for target, _, _, value in self.writes}
            for position in range(end):
                place = self.place(row.given["page_table"], position)
                held = written.get((id(self.heads), *place), self.heads[place])
                assert held == (*tokens, last)[position + 1], f"the head's cache holds {held} at {position} of {(*tokens, last)}"
        drafts = self.drafts(row, [*tokens, last])
        for offset, token in enumerate(drafts):
            if end + offset < self.limits.max_model_len:
                self.write(self.heads, row.given["page_table"], end + offset, token)
        if k:
            outputs["drafts"][i] = drafts
        self.put("seat", self.tokens, row.seat, [last, *drafts])
        self.put("start", self.starts, row.seat, end)
        self.put("chosen", self.chosen, row.seat, chosen)

    def drafts(self, row: Row, known: list[int]) -> list[int]:
        """As many as there are, each right with the toy's likelihood; to be right it looks up what nobody told the device."""
        made = []
        for _ in range(self.limits.drafts):
            draft = self.draw.randrange(VOCAB)
            if row.owner is not None and self.draw.random() < self.right:
                how = [float(row.given[name]) for name in SETTINGS]
                u = uniform(row.owner.sampling.seed or 0, len(known) - len(row.owner.prompt))
                draft = next_token(known, fold_all(known), how, u)
            made.append(draft)
            known = [*known, draft]
        return made

    def say(self, outputs: dict[str, np.ndarray], row: Row, i: int, j: int, tokens: list[int], state: int, sampled: int) -> None:
        outputs["tokens"][i, j] = sampled
        if self.most_logprobs and row.given["logprobs"]:
            found = told(tokens, state, sampled, self.most_logprobs)
            outputs["chosen_logprobs"][i, j] = found.logprob
            outputs["top_ids"][i, j] = [token for token, _ in found.top]
            outputs["top_logprobs"][i, j] = [value for _, value in found.top]

    def check_uniform(self, row: Row, u: float, position: int) -> None:
        if row.owner is None:
            return
        sampling = row.owner.sampling
        right = uniform(sampling.seed or 0, position - len(row.owner.prompt)) if sampling.temperature else 0.0
        assert u == right, f"token {position} of {row.owner.id!r} is drawn with {u}, and its own number is {right}"

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
    """Raised by a step that was told to fail."""


@dataclass
class Flight:
    """A step that was launched and has perhaps not run yet."""

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
    """An executor that lets its caller run ahead, over one or several dp groups that have nothing in common but the step's bucket.

    Attributes:
        lazy: a step runs when its outcome is waited for, and not when it is launched.
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
    right: float = 0.5
    lazy: bool = False
    fail_at: frozenset[int] = frozenset()
    refuse_at: frozenset[int] = frozenset()
    on_run: Callable[[], None] = lambda: None
    vocab_size: int = VOCAB
    refreshes: int = 0
    log: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memories = [Memory(self.limits, self.right, self.max_logprobs, random.Random(group)) for group in range(self.groups)]
        self.flights: list[Flight] = []
        self.done = 0

    @property
    def runs(self) -> int:
        """Steps launched, or refused."""
        return len(self.flights)

    @property
    def rows(self) -> Counter[str]:
        """Live rows by bucket name, of steps that did not fail."""
        return sum((memory.rows for memory in self.memories), Counter())

    def serve(self, engine: Engine) -> None:
        """Learns who owns what in the pools of this engine."""
        for memory, holdings in zip(self.memories, engine._holdings, strict=True):
            memory.holdings = holdings

    def knows(self, request: Request) -> None:
        """Learns of a request, so that its random numbers are checked and its drafts can be right."""
        for memory in self.memories:
            memory.requests[request.id] = request

    def launch(self, bucket: Bucket, inputs: Sequence[Inputs]) -> Flight:
        assert bucket in self.buckets
        number = len(self.flights) + 1
        self.log.append(("launch" if number not in self.refuse_at else "refused", number))
        found = [(memory, memory.found(bucket, one), memory.dead()) for memory, one in zip(self.memories, inputs, strict=True)]

        def run() -> list[dict[str, np.ndarray]]:
            self.on_run()
            if number in self.fail_at | self.refuse_at:
                for memory, rows, _ in found:
                    memory.fail(rows)
                raise Failed(f"run {number} was told to fail")
            return [memory.run(bucket, rows, dead) for memory, rows, dead in found]

        self.flights.append(Flight(self, number, run))
        if number in self.refuse_at:
            self.run_up_to(number)
            raise Failed(f"run {number} was told to fail")
        if not self.lazy:
            self.run_up_to(number)
        return self.flights[-1]

    def run_up_to(self, number: int) -> None:
        """Runs what was launched up to this step, in order."""
        while self.done < number:
            self.done += 1
            self.flights[self.done - 1].run()

    def run(self, bucket: Bucket, inputs: Inputs) -> dict[str, np.ndarray]:
        (outputs,) = self.run_groups(bucket, [inputs])
        return outputs

    def run_groups(self, bucket: Bucket, inputs: Sequence[Inputs]) -> list[dict[str, np.ndarray]]:
        return self.launch(bucket, inputs).result()

    def refresh(self) -> bool:
        self.refreshes += 1
        return True

    def compiles(self) -> int:
        return 0

    def check_order(self, run_ahead: int) -> None:
        """Outcomes are read in order, and no step is launched while more than `run_ahead` are in flight."""
        flying: list[int] = []
        for what, number in self.log:
            if what == "launch":
                assert len(flying) <= run_ahead, f"step {number} is launched while {flying} are in flight"
                flying.append(number)
            elif what == "result":
                assert flying.pop(0) == number
        assert not flying


class Synchronous:
    """The same device as an executor that can only run a step while its caller waits."""

    def __init__(self, device: ToyDevice) -> None:
        self.device = device
        self.limits, self.buckets, self.vocab_size, self.groups = device.limits, device.buckets, device.vocab_size, device.groups
        self.max_logprobs = device.max_logprobs
        self.refresh, self.compiles, self.run, self.run_groups = device.refresh, device.compiles, device.run, device.run_groups


class Collect:
    """A sink that checks the protocol: tokens, then one end, then silence."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.events: list[TokenEvent] = []
        self.end: Any = None

    def __call__(self, event: TokenEvent | FinishEvent) -> None:
        assert self.end is None, f"{event} after the end"
        if isinstance(event, FinishEvent):
            self.end = event
            return
        assert event.token_ids
        assert len(event.logprobs) in (0, len(event.token_ids))
        self.events.append(event)
        self.tokens += event.token_ids
        self.logprobs += event.logprobs


class Clock:
    """A clock that goes on by one second whenever it is read."""

    def __init__(self) -> None:
        self._ticks = itertools.count(1)

    def __call__(self) -> float:
        return float(next(self._ticks))


class Serving(NamedTuple):
    """An engine, and the device under it."""

    engine: Engine
    device: ToyDevice

    def submit(self, request: Request, sink: Callable[[Any], None] | None = None) -> Any:
        """Asks for a request, and returns where its events go."""
        sink = sink or Collect()
        self.device.knows(request)
        self.engine.submit(request, sink)
        return sink

    def drain(self, most: int = 100_000) -> None:
        """Steps until nothing is left to do."""
        for _ in range(most):
            if not self.engine.step():
                return
        raise AssertionError(f"the engine is not idle after {most} steps")


def buckets_of(drafts: int, prefill: Sequence[int] = (3, 8), decode: Sequence[int] = (2, 4)) -> tuple[Bucket, ...]:
    """Prefill buckets of so many tokens, decode buckets of so many rows."""
    return (*(Bucket("prefill", 1, size) for size in prefill), *(Bucket("decode", rows, drafts + 1) for rows in decode))


def serving(
    limits: Limits | None = None,
    buckets: Sequence[Bucket] | None = None,
    *,
    drafts: int = 0,
    clock: Callable[[], float] | None = None,
    prefill_burst: int = 1,
    refresh_every_s: float | None = 1.0,
    run_ahead: int | None = None,
    synchronous: bool = False,
    **device: Any,
) -> Serving:
    """An engine over a toy; without more said it has room for eight requests of 32 tokens, and pages for two.

    Args:
        drafts: of limits and buckets that are not given.
        synchronous: the executor can only run a step while the engine waits.
        device: attributes of the ToyDevice.
    """
    limits = limits or limits_of(4, 17, 8, 32, drafts)
    toy = ToyDevice(limits, tuple(buckets or buckets_of(limits.drafts)), **device)
    options: dict[str, Any] = {"prefill_burst": prefill_burst, "refresh_every_s": refresh_every_s, "run_ahead": run_ahead}
    engine = Engine(Synchronous(toy) if synchronous else toy, clock=clock or Clock(), **options)
    toy.serve(engine)
    return Serving(engine, toy)
