"""Servers that hand over over the real transfer engine, stepped by hand: what two servers do, without what they tell each other."""

from __future__ import annotations

import math
import queue
from collections.abc import Sequence

from support import ranks

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.engine import Engine
from npucompile.runtime.executor import Executor
from npucompile.runtime.kv_transfer.layout import instance_of, located
from npucompile.runtime.kv_transfer.messages import Ready
from npucompile.runtime.kv_transfer.opening import open_pools
from npucompile.runtime.kv_transfer.pools import Peer
from npucompile.runtime.request import RECEIVE, SEND, ParkedEvent, Request, TokenEvent

WAIT_S = 240
"""Longer than two attempts of an engine, so that the reason is told."""


class Server:
    """A server that computes prompts for others, and goes on with those of others or its own.

    Attributes:
        peer: this server, as another one knows it.
        parked: by request id, of the two requests of a handover.
    """

    def __init__(self, executor: Executor, artifact: Artifact) -> None:
        self.executor, self.pools = executor, open_pools(executor, "127.0.0.1")
        self.peer = Peer(located(instance_of(artifact.manifest), self.pools.ranks), self.pools.sessions)
        self.lease = self.pools.lease()
        self.lease.extend(math.inf)
        self.reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.start()

    def start(self) -> None:
        """Begins with an engine that knows nothing."""
        self.engine = Engine(self.executor, refresh_every_s=None)
        self.parked: dict[str, ParkedEvent] = {}
        self.engine.stepper.on_parked = lambda event: self.parked.update({event.request_id: event})

    def run(self) -> None:
        while self.engine.step():
            pass

    def compute(self, prompt: Sequence[int]) -> None:
        self.engine.submit(Request("source", tuple(prompt), 1, handover=SEND), lambda event: None)
        self.run()

    def reserve(self, prompt: Sequence[int], max_tokens: int = 6) -> list[int]:
        """Finds pages for a prompt; returns where its tokens will be."""
        tokens: list[int] = []
        self.engine.submit(
            Request("target", tuple(prompt), max_tokens, handover=RECEIVE),
            lambda event: tokens.extend(event.token_ids) if isinstance(event, TokenEvent) else None,
        )
        self.run()
        ranks.eventually(lambda: "target" in self.parked)
        return tokens

    def write(self, to: Server, known: int = 0) -> str:
        """Writes what was computed to where it is reserved, but for so many pages."""
        target = to.parked["target"]
        ready = Ready(1, target.group, list(target.pages), known, target.slot)
        self.pools.write(self.parked["source"], to.peer, ready, self.lease, self.reasons.put)
        return self.reasons.get(timeout=WAIT_S)

    def land(self) -> None:
        self.engine.landed("target")
        self.run()

    def free(self) -> None:
        self.engine.cancel("source")
        self.run()


def hand_over(source: Server, target: Server, prompt: Sequence[int], max_tokens: int = 6) -> list[int]:
    """The tokens of a prompt that one server has computed, and another one, or itself, goes on with."""
    source.compute(prompt)
    tokens = target.reserve(prompt, max_tokens)
    assert (source.write(target), tokens) == ("", [])
    source.free()
    target.land()
    return tokens
