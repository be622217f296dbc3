"""server/engine/remote_engine.py, with runtime/engine_host.py behind it: over a channel an engine answers as it does beside its server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import toy_device as toy
from support.grammars import COMPILER, masks

from npucompile.graphs.errors import NpucompileError, RequestError
from npucompile.runtime.channel import Channel
from npucompile.runtime.engine_host import EngineHost, Submit
from npucompile.runtime.executor import ExecutorFacts
from npucompile.runtime.request import FinishEvent, Request, Sampling
from npucompile.runtime.scheduler.kv_cache_manager import PrefixCacheSettings
from npucompile.server.engine import remote_engine
from npucompile.server.engine.remote_engine import RemoteEngine
from npucompile.server.grammar.compiler import GrammarConstraint, GrammarSource

WAIT_S = 30


class Sink(toy.Collector):
    """A collector that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.done = threading.Event()

    def __call__(self, event: Any) -> None:
        super().__call__(event)
        if isinstance(event, FinishEvent):
            self.done.set()


class Far:
    """An engine over a toy device that another process would have, and the near side of it."""

    def __init__(self, revive: Callable[[Request], Request]) -> None:
        self.served = toy.serving(prefix_cache=PrefixCacheSettings())
        self.state: Mapping[str, Any] = {"status": "ok"}
        self.submitted: list[int] = []
        self.ended: list[str] = []
        near, far = socket.socketpair()
        self.channels = (
            Channel(Connection(near.detach()), lambda record: self.near.take(record), lambda: None),
            Channel(Connection(far.detach()), self._take, lambda: None),
        )
        self.near = RemoteEngine(self.channels[0].send, ExecutorFacts.of(self.served.engine.executor))
        self.near.on_end = lambda end: self.ended.append(end.request_id)
        self.host = EngineHost(self.served.engine, self.channels[1], lambda: self.state, revive)

    def _take(self, record: Any) -> None:
        if isinstance(record, Submit):
            self.submitted.append(len(record.requests))
            for request in record.requests:
                self.served.device.register(request)
        self.host.take(record)

    def submit(self, request: Request) -> Sink:
        sink = Sink()
        self.near.submit(request, sink)
        return sink


@contextmanager
def far(revive: Callable[[Request], Request] = lambda request: request, *, runs: bool = True) -> Iterator[Far]:
    side = Far(revive)
    for channel in side.channels:
        channel.start()
    if runs:
        side.served.engine.start()
    try:
        yield side
    finally:
        side.served.engine.stop(drain=False)
        side.host.close()


def ask(name: str, prompt: tuple[int, ...] = (1, 2, 3), tokens: int = 4, **options: Any) -> Request:
    return Request(name, prompt, tokens, Sampling(seed=0), **options)


@given(prompts=st.lists(st.lists(st.integers(0, toy.VOCAB - 1), min_size=1, max_size=9).map(tuple), min_size=1, max_size=5))
def test_tokens_and_records_are_those_of_an_engine_that_is_asked_directly(prompts: list[tuple[int, ...]]) -> None:
    requests = [ask(f"r{i}", prompt, 1 + i) for i, prompt in enumerate(prompts)]
    direct = toy.serving(prefix_cache=PrefixCacheSettings())
    expected = [direct.submit(request) for request in requests]
    direct.drain()
    with far() as side:
        side.near.hold()
        sinks = [side.submit(request) for request in requests]
        side.near.release()
        assert all(sink.done.wait(WAIT_S) for sink in sinks)
        assert side.submitted == [len(requests)]
        assert [sink.tokens for sink in sinks] == [sink.tokens for sink in expected]
        assert [(sink.end.reason, sink.end.record.decode_steps) for sink in sinks] == [
            (sink.end.reason, sink.end.record.decode_steps) for sink in expected
        ]
        assert sorted(side.ended) == sorted(request.id for request in requests)


def test_what_can_never_be_served_is_refused_here_and_what_the_engine_refuses_is_the_end_of_a_request() -> None:
    with far(runs=False) as side:
        with pytest.raises(RequestError, match=r"the prompt has 0 tokens"):
            side.submit(ask("a", ()))
        side.submit(ask("b"))
        with pytest.raises(RequestError, match="id 'b' is the id of a live request"):
            side.submit(ask("b"))
        side.near.stats()
        side.served.engine.refuse("it is stopping")
        late = side.submit(ask("c"))
        assert late.done.wait(WAIT_S)
        assert (late.end.reason, late.end.code) == ("error", "engine_stopped")
        assert "it is stopping" in late.end.message


def test_requests_are_cancelled_by_their_server_even_while_they_are_held_and_by_the_end_of_its_process() -> None:
    with far(runs=False) as side:
        side.near.hold()
        first, second = side.submit(ask("a", tokens=9)), side.submit(ask("b", tokens=9))
        assert side.near.cancel("a", "unknown")
        assert not side.near.cancel("unknown")
        side.near.release()
        assert side.near.stats()["num_requests_waiting"] == 2
        side.served.engine.step()
        assert first.done.wait(WAIT_S)
        assert first.end.reason == "cancelled"
        assert not second.done.is_set()
        side.host.close()
        side.served.engine.step()
        assert second.done.wait(WAIT_S)
        assert second.end.reason == "cancelled"


def test_questions_are_answered_and_silence_is_named() -> None:
    with far() as side:
        assert side.near.flush_prefix_cache() is True
        expected = side.served.engine.stats()
        assert set(side.near.stats()) == set(expected)
        side.near.take(remote_engine.Health({"status": "ok", "buckets": 3}))
        assert side.near.health()["status"] == "ok"
        with mock.patch.object(remote_engine, "SILENCE_S", -1.0):
            assert side.near.health()["status"] == "stuck"
        silent = RemoteEngine(lambda record: None, side.near.executor)
        with mock.patch.object(remote_engine, "ANSWER_S", 0.01), pytest.raises(NpucompileError, match="has not answered 'stats'"):
            silent.stats()


def test_a_grammar_goes_as_text_and_allows_the_same_tokens_there() -> None:
    constraint = COMPILER.constraint("regex", "(ab|c)+")
    revived: list[GrammarConstraint] = []

    def revive(request: Request) -> Request:
        source: Any = request.constraint
        assert isinstance(source, GrammarSource)
        revived.append(COMPILER.revived(source))
        return replace(request, constraint=None)

    with far(revive) as side:
        takes = replace(side.near.executor.limits, bitmasks=1, bitmask_words=1)
        side.near.executor = side.near.executor._replace(limits=takes)
        assert side.submit(ask("a", constraint=constraint)).done.wait(WAIT_S)
    assert masks(revived[0], []) == masks(constraint, [])
