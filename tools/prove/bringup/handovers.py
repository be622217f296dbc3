"""Handovers of a server to itself: what prompts leave in its pools arrives, byte for byte, in other pages of them."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ....graphs.errors import NpucompileError
from ....graphs.steps.table import kind_of
from ....runtime.engine import Engine
from ....runtime.executor import Executor
from ....runtime.kv_transfer.layout import PAGES, Instance, Region
from ....runtime.kv_transfer.messages import Ready
from ....runtime.kv_transfer.pools import Peer, Pools
from ....runtime.request import RECEIVE, SEND, Event, FinishEvent, ParkedEvent, Request, TokenEvent
from ...progress import Bar
from .results import BringupFailure

WHAT = "a handover to itself"
TOKENS, PROMPTS = 2, 2
SOURCE, TARGET = "source", "target"

ReadItem = Callable[[Region, int], bytes]
"""The bytes that travel of an item, by the pool of rank 0 and the number of a page or slot."""


class HandoverError(NpucompileError):
    """Raised when bytes do not arrive."""


class Handovers(NamedTuple):
    """A server that hands over to itself, stepped by hand.

    Attributes:
        instance: how it describes itself, with the addresses of its pools.
        read: reads rank 0's pools.
        timeout_s: how long bytes may take.
    """

    executor: Executor
    pools: Pools
    instance: Instance
    read: ReadItem
    timeout_s: float

    def run(self, bar: Bar) -> tuple[list[BringupFailure], dict[str, Any]]:
        """Hands prompts of lengths around a page over; with decode buckets their first tokens are those without a handover, but for one:
        the last token of a prompt is computed by another bucket, which rounds otherwise, and every token follows from those before it."""
        prompts, nbytes, different = self._prompts(), 0, 0
        decodes = any(kind_of(bucket).decodes for bucket in self.executor.buckets)
        for prompt in prompts:
            try:
                count, tokens = self._handed_over(prompt, decodes)
                nbytes += count
                different += decodes and tokens[0] != self._complete(prompt)[0]
            except NpucompileError as error:
                return [BringupFailure.of("handovers", f"{WHAT} of {len(prompt)} tokens", error)], {}
            bar.step(f"{len(prompt)} tokens")
        facts = {"prompts": PROMPTS, "compared_bytes": nbytes, "other_tokens": different}
        if different > 1:
            message = f"{different} of {PROMPTS} prompts have another first token after a handover than without; legal is one at most"
            return [BringupFailure("handovers", WHAT, message)], facts
        return [], facts

    def _prompts(self) -> list[list[int]]:
        limits, generator = self.executor.limits, np.random.default_rng(0)
        lengths = [min(length, limits.max_model_len - TOKENS - 1) for length in (2, limits.page_size + 2)]
        return [generator.integers(0, self.executor.vocab_size, length).tolist() for length in lengths]

    def _handed_over(self, prompt: Sequence[int], decodes: bool) -> tuple[int, list[int]]:
        """Bytes of rank 0 that were compared, and tokens after the handover.

        Args:
            decodes: whether there are decode buckets; else pages of another prompt are overwritten.
        """
        parked: dict[str, ParkedEvent] = {}
        arrived = threading.Event()
        engine = Engine(self.executor, refresh_every_s=None)

        def on_parked(event: ParkedEvent) -> None:
            parked[event.request_id] = event
            arrived.set()

        engine.stepper.on_parked = on_parked
        outcome = _Outcome()
        engine.submit(Request(SOURCE, tuple(prompt), 1, handover=SEND), outcome)
        if decodes:
            engine.submit(Request(TARGET, tuple(prompt), TOKENS, handover=RECEIVE), outcome)
        else:
            engine.submit(Request(TARGET, tuple(reversed(prompt)), 1, handover=SEND), outcome)
        while parked.keys() != {SOURCE, TARGET}:
            arrived.clear()
            while engine.step():
                pass
            if parked.keys() != {SOURCE, TARGET} and not arrived.wait(self.timeout_s):
                raise HandoverError(f"no pages within {self.timeout_s:g} s: {outcome.message or 'the ranks do not answer'}")
        source, target = parked[SOURCE], parked[TARGET]
        reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
        lease = self.pools.lease()
        lease.extend(math.inf)
        peer = Peer(self.instance, self.pools.sessions)
        self.pools.write(source, peer, Ready(1, target.group, list(target.pages), 0, target.slot), lease, reasons.put)
        try:
            reason = reasons.get(timeout=self.timeout_s)
        except queue.Empty:
            reason = f"the transfer engine has not said within {self.timeout_s:g} s that the bytes have arrived"
        if reason:
            raise HandoverError(reason)
        compared = self._compared(source, target) if source.group == target.group == 0 else 0
        engine.cancel(SOURCE)
        if decodes:
            engine.landed(TARGET)
        else:
            engine.cancel(TARGET)
        while engine.step():
            pass
        if decodes and len(outcome.tokens) != TOKENS:
            raise HandoverError(f"{len(outcome.tokens)} tokens after the handover; {TOKENS} were asked for. {outcome.message or ''}")
        return compared, outcome.tokens

    def _compared(self, source: ParkedEvent, target: ParkedEvent) -> int:
        total = 0
        for region in self.pools.ranks[0]:
            pairs = zip(source.pages, target.pages, strict=True) if region.axis == PAGES else ((source.slot, target.slot),)
            for sent, received in pairs:
                wanted, actual = self.read(region, sent), self.read(region, received)
                if wanted != actual:
                    wrong = sum(a != b for a, b in zip(wanted, actual, strict=True))
                    what = f"item {received} of pool {region.name}, at {region.address + received * region.stride_bytes:#x}"
                    raise HandoverError(f"{wrong} of {len(wanted)} bytes of {what}, are not those of item {sent}, which were sent there")
                total += len(wanted)
        return total

    def _complete(self, prompt: Sequence[int]) -> list[int]:
        engine, outcome = Engine(self.executor, refresh_every_s=None), _Outcome()
        engine.submit(Request("alone", tuple(prompt), TOKENS), outcome)
        while engine.step():
            pass
        if len(outcome.tokens) != TOKENS:
            raise HandoverError(f"{len(outcome.tokens)} tokens without a handover; {TOKENS} were asked for. {outcome.message or ''}")
        return outcome.tokens


class _Outcome:
    """What requests got: tokens, and the last error."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.message: str | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, TokenEvent):
            self.tokens += event.token_ids
        elif isinstance(event, FinishEvent):
            self.message = event.message
