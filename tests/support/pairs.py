"""A prefill and a decode server over the tiny hybrid in one process, stepped by hand, without sockets."""

from __future__ import annotations

import ctypes
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.delivery import Sink
from npucompile.runtime.engine import Engine
from npucompile.runtime.kv_transfer import messages
from npucompile.runtime.kv_transfer.landed_requests import LandedRequests
from npucompile.runtime.kv_transfer.layout import Instance, Region, located
from npucompile.runtime.kv_transfer.lease import LEASE_S, Lease
from npucompile.runtime.kv_transfer.open_rooms import PeerConnection
from npucompile.runtime.kv_transfer.pools import Peer
from npucompile.runtime.kv_transfer.receiver import Receiver
from npucompile.runtime.kv_transfer.segments import segments
from npucompile.runtime.kv_transfer.sender import Sender
from npucompile.runtime.kv_transfer.transfer_engine import RegisteredMemory
from npucompile.runtime.kv_transfer.write_access import WriteAccess
from npucompile.runtime.request import FinishEvent, ParkedEvent, Request, Sampling
from npucompile.runtime.scheduler.kv_cache_manager import PrefixCacheSettings

PROMPT = tuple(3 + (7 * place) % 50 for place in range(40))

EXECUTORS: dict[tuple[Path, str], CpuExecutor] = {}


def server(artifact: Path, role: str) -> tuple[Engine, tuple[Region, ...]]:
    if (artifact, role) not in EXECUTORS:
        EXECUTORS[artifact, role] = CpuExecutor(Artifact.open(artifact))
    executor = EXECUTORS[artifact, role]
    # A decode server has fewer pages than its pools, so that requests lose theirs.
    executor.limits = replace(executor.limits, num_pages=11 if role == "decode" else 17)
    return Engine(executor, refresh_every_s=None, prefix_cache=PrefixCacheSettings()), executor.regions


class Pooled(NamedTuple):
    """The part of an executor that handovers are about."""

    regions: tuple[Region, ...]

    @property
    def areas(self) -> tuple[RegisteredMemory, ...]:
        return tuple(RegisteredMemory(region.address, region.nbytes) for region in self.regions)


class Writes:
    """`Pools` of both servers over memory of one process, whose writes are made when a test says so: also after the reader has given
    the writer up, as by a process that was stopped.

    Attributes:
        session: what is opened again is not written by who knows the last one.
        guard: is told of every page and slot that is written.
    """

    def __init__(self, own: Sequence[Region]) -> None:
        self.own = own
        self.waiting: deque[Callable[[bool], None]] = deque()
        self.session = 0
        self.guard: Callable[[messages.Ready], None] = lambda target: None

    @property
    def sessions(self) -> list[str]:
        return [str(self.session)]

    def lease(self) -> Lease:
        return Lease()

    def write(
        self, source: ParkedEvent, peer: Peer, target: messages.Ready, lease: Lease, done: Callable[[str], None]
    ) -> Callable[[], None]:
        pages = [*zip(source.pages, target.pages, strict=True)][target.known :]
        plan = segments(self.own, peer.instance.rank(0), {"pages": pages, "slots": [(source.slot, target.slot)]})

        def finish(fails: bool) -> None:
            if peer.sessions != self.sessions:
                done("there is no such session")
                return
            self.guard(target)
            for segment in plan[: len(plan) // 2] if fails else plan:
                ctypes.memmove(segment.target, segment.source, segment.nbytes)
            done("the link is down" if fails else "")

        self.waiting.append(finish)
        return lambda: None

    def reopen(self, done: Callable[[str], None]) -> None:
        self.session += 1
        done("")


class Pair:
    """Two servers, stepped by hand.

    Attributes:
        reachable: whether requests that have lost their pages are handed over again.
    """

    reachable = True

    def __init__(self, artifact: Path) -> None:
        self.now_s = 0.0
        (self.p, own), (self.d, target) = server(artifact, "prefill"), server(artifact, "decode")
        self.writes = Writes(own)
        self.instance = located(Instance("", 16, 3, 1, 64, (), ((),)), [target])
        self.calls: deque[Callable[[], None]] = deque()
        self.connections = itertools.count()
        self.numbers = itertools.count(1)
        self.senders: list[Sender] = []
        self.results: dict[str, list[Any]] = {}
        self.d.stepper.on_parked = lambda event: self.landed.parked(event) or any(r.parked(event) for r in self.receivers)
        self.p.stepper.on_parked = lambda event: [s.parked(event) for s in self.senders] and None
        self.receivers: list[Receiver] = []
        reopened = lambda: self.receivers[-1].reopened(self.writes.sessions)  # noqa: E731
        self.access = WriteAccess(self.writes, self.calls.append, lambda: self.now_s, reopened)
        self.landed = LandedRequests(self.d, self.calls.append, self.lost, self.late)
        self.connect()

    def connect(self) -> None:
        self.to_p: deque[str] = deque()
        self.to_d: deque[str] = deque()
        clock = lambda: self.now_s  # noqa: E731
        to_p, to_d = self.to_p, self.to_d
        send = [lambda message, queue=queue: queue.append(messages.encode(message)) for queue in (to_d, to_p)]
        ends = [PeerConnection(engine, own, self.calls.append, clock) for engine, own in zip((self.p, self.d), send, strict=True)]
        self.senders.append(Sender(ends[0], self.writes, Peer(self.instance, self.writes.sessions), f"c{next(self.connections)}"))
        self.receivers.append(Receiver(ends[1], lambda: next(self.numbers), self.landed, self.access))

    def ask(self, request: Request) -> None:
        events = self.results[request.id] = []
        self.receivers[-1].ask(request, events.append, events.append)

    def cut(self) -> None:
        self.to_p.clear()
        self.to_d.clear()
        self.senders[-1].disconnected()
        self.receivers[-1].disconnected()
        self.connect()

    def leave(self, number: int) -> None:
        request_id = sorted(self.results)[number % len(self.results)]
        self.cancel(request_id)

    def cancel(self, request_id: str) -> None:
        if not any([receiver.cancel(request_id) for receiver in self.receivers]):
            self.d.cancel(request_id)

    def late(self, event: FinishEvent) -> None:
        for receiver in self.receivers:
            receiver.cancel(event.request_id)

    def lost(self, request: Request, sink: Sink, parked: ParkedEvent) -> None:
        if self.reachable:
            self.receivers[-1].ask_again(request, sink, self.results[request.id].append, parked)
        else:
            self.landed.compute_here(request, sink)

    def wait(self) -> None:
        parts = [*self.senders, *self.receivers]
        # Where nothing is due, memory is opened again meanwhile.
        deadlines = [handover.room.deadline_s for part in parts for handover in part._handovers.values()]
        self.now_s = min((due_s for due_s in deadlines if due_s < float("inf")), default=self.now_s + LEASE_S)
        for part in parts:
            part.tick()

    def go_on(self) -> bool:
        """One thing that happens where nobody interferes; returns whether there was any."""
        if self.calls:
            self.calls.popleft()()
        elif self.to_p:
            self.senders[-1].received(messages.decode(self.to_p.popleft()))
        elif self.to_d:
            self.receivers[-1].received(messages.decode(self.to_d.popleft()))
        elif not (self.p.step() or self.d.step()):
            if not self.writes.waiting:
                return False
            self.writes.waiting.popleft()(False)
        return True

    def settle(self) -> None:
        for _ in range(50):
            while self.go_on():
                pass
            if not any(part.rooms for part in (*self.senders, *self.receivers)):
                return
            self.wait()
        raise AssertionError("rooms are left open")


def alone(artifact: Path, prompt: tuple[int, ...], length: int = 6) -> list[int]:
    engine, _ = server(artifact, "alone")
    tokens: list[int] = []
    engine.submit(Request("alone", prompt, length, Sampling(seed=1)), lambda event: tokens.extend(getattr(event, "token_ids", ())))
    while engine.step():
        pass
    return tokens


def crowded(artifact: Path) -> Pair:
    """A pair whose decode server has fewer pages than the requests that run there will take."""
    pair = Pair(artifact)
    for number in range(6):
        pair.ask(Request(f"r{number}", PROMPT[number : number + 17], 40, Sampling(seed=1), skip_reading_prefix_cache=True))
    # Two pages each, of ten, and one kept for each that runs; then they grow to four.
    while len(pair.writes.waiting) < 3:
        assert pair.go_on()
    while pair.writes.waiting:
        pair.writes.waiting.popleft()(False)
    return pair


def check(pair: Pair, artifact: Path, *failed: str) -> None:
    """All requests end right, though some have lost their pages, but for those that had not landed where a handover failed."""
    pair.settle()
    preemptions = 0
    for number in range(len(pair.results)):
        *events, end = pair.results[f"r{number}"]
        if (not events and end) in failed:
            continue
        assert end.reason == "length"
        assert [token for event in events for token in event.token_ids] == alone(artifact, PROMPT[number : number + 17], 40)
        preemptions += end.record.preemptions
    assert preemptions > 0
    pair.d.stepper.check()
