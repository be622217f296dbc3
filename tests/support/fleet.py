"""Prefill servers and a decode server in one process, over sockets and the real transfer engine."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support import ranks
from support.texts import byte_codec

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.engine import Engine
from npucompile.runtime.executor import Executor
from npucompile.runtime.kv_transfer.layout import Instance, instance_of, located
from npucompile.runtime.kv_transfer.opening import open_pools
from npucompile.runtime.kv_transfer.pools import Pools
from npucompile.runtime.kv_transfer.room import DEFAULTS, Timeouts
from npucompile.runtime.request import FinishEvent, Logprobs, Request
from npucompile.runtime.scheduler.kv_cache_manager import PrefixCacheSettings
from npucompile.server.engine.service import ServedModel, Service
from npucompile.server.fleet.decode_engine import DecodeEngine
from npucompile.server.fleet.prefill_hub import PrefillHub
from npucompile.server.guard.access import Access
from npucompile.server.run import Serving, running

ADDRESS = "127.0.0.1"
LONGEST_S = 60.0


class OneKind:
    """An executor without the buckets of the other kind, as an artifact of one phase has it."""

    def __init__(self, executor: Executor, kind: str) -> None:
        self._executor = executor
        self.buckets = tuple(bucket for bucket in executor.buckets if bucket.kind == kind)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


@dataclass
class Answer:
    """What one request has got so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    scored: list[Logprobs] = field(default_factory=list)
    end: FinishEvent | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def __call__(self, event: Any) -> None:
        assert self.end is None, event
        if isinstance(event, FinishEvent):
            self.end = event
            self.ended.set()
        else:
            self.tokens += event.token_ids
            self.logprobs += event.logprobs
            self.scored += event.prompt_logprobs

    def wait(self) -> Answer:
        assert self.ended.wait(LONGEST_S)
        return self


class PrefillServer:
    """One that can be stopped, and started again at the same port."""

    def __init__(
        self, artifact: Artifact, executor: Any, change: Callable[[Instance], Instance], timeouts: Timeouts, keys: Sequence[str]
    ) -> None:
        self.artifact, self.engine = artifact, started(executor)
        self.pools = open_pools(executor._executor, ADDRESS)
        self._change, self._timeouts, self._keys = change, timeouts, keys
        self.port = 0
        self.start()

    def start(self) -> None:
        self.stack = ExitStack()
        limits = self.engine.executor.limits
        self.service = Service(self.engine, byte_codec(), ServedModel("tiny", limits.max_model_len, self.engine.executor.vocab_size))
        instance = self._change(located(instance_of(self.artifact.manifest), self.pools.ranks))
        self.hub = self.service.handovers = PrefillHub(self.engine, self.pools, instance, self._timeouts)
        settings = Serving(access=Access.of(self._keys, (), ()))
        self.server = self.stack.enter_context(running(self.service, ADDRESS, self.port, settings=settings))
        self.port = self.server.port

    def stop(self) -> None:
        """Its connections are closed; its engine goes on."""
        self.stack.close()


class Fleet:
    """Prefill servers, and a decode server without prefill buckets.

    Args:
        change: what each prefill server says of itself.
        mixed: the decode server has prefill buckets.
        keys: of the prefill servers.
        load: makes the executor of each server.

    Attributes:
        instance: how the decode server describes itself.
    """

    def __init__(
        self,
        artifact: Path,
        prefills: int = 1,
        *,
        change: Callable[[Instance], Instance] = lambda instance: instance,
        mixed: bool = False,
        timeouts: Timeouts = DEFAULTS,
        keys: Sequence[str] = (),
        headers: dict[str, str] | None = None,
        load: Callable[[Artifact], Executor] = CpuExecutor,
    ) -> None:
        opened = Artifact.open(artifact)
        self.prefills = [PrefillServer(opened, OneKind(load(opened), "prefill"), change, timeouts, keys) for _ in range(prefills)]
        executor = load(opened)
        self.pools: Pools = open_pools(executor, ADDRESS)
        self.engine = started(executor if mixed else OneKind(executor, "decode"))
        self.instance = located(instance_of(opened.manifest), self.pools.ranks)
        urls = [f"http://{ADDRESS}:{prefill.port}" for prefill in self.prefills]
        self.decode = DecodeEngine(self.engine, self.instance, self.pools, urls, headers or {}, timeouts)

    def connected(self, count: int | None = None) -> None:
        """Waits until so many prefill servers are connected; None for all."""
        wanted = len(self.prefills) if count is None else count
        until(lambda: sum(link.receiver is not None for link in self.decode.links) == wanted)

    def ask(self, request: Request) -> Answer:
        answer = Answer()
        self.decode.submit(request, answer)
        return answer

    def check(self) -> None:
        """Nothing is held."""
        until(lambda: self.decode.stats()["kv_transfer_rooms"] == 0 and not any(prefill.hub.rooms for prefill in self.prefills))
        for engine in (self.engine, *(prefill.engine for prefill in self.prefills)):
            until(lambda engine=engine: not engine.stats()["num_requests_running"] + engine.stats()["num_requests_waiting"])
            engine.stepper.check()

    def close(self) -> None:
        self.decode.close()
        for prefill in self.prefills:
            prefill.stop()
            prefill.engine.stop(drain=False)
            prefill.pools.close()
        self.engine.stop(drain=False)
        self.pools.close()


def started(executor: Any) -> Engine:
    engine = Engine(executor, refresh_every_s=None, prefix_cache=PrefixCacheSettings())
    engine.start()
    return engine


until = functools.partial(ranks.eventually, seconds=LONGEST_S)
