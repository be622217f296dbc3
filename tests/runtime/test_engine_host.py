"""runtime/engine_host.py: what another process is told without asking; `tests/server/engine/test_remote_engine.py` has the rest."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any
from unittest import mock
from unittest.mock import Mock

from support import toy_device as toy

from npucompile.runtime import engine_host
from npucompile.runtime.engine_host import EngineHost, Events, Health, Submit
from npucompile.runtime.executor import ExecutorFacts
from npucompile.runtime.request import Request, Sampling


def test_a_step_is_one_record_and_health_is_told_until_the_host_closes() -> None:
    sent: list[Any] = []
    served, states = toy.serving(), iter(range(10**6))
    channel: Any = SimpleNamespace(send=sent.append)
    with mock.patch.object(engine_host, "HEALTH_S", 0.001):
        host = EngineHost(served.engine, channel, lambda: {"number": next(states)}, lambda request: request)
        deadline = time.monotonic() + 20
        while sum(isinstance(record, Health) for record in sent) < 3 and time.monotonic() < deadline:
            time.sleep(0.001)
    assert [record.state["number"] for record in sent if isinstance(record, Health)][:3] == [0, 1, 2]
    requests = tuple(Request(name, (1, 2), 3, Sampling(seed=0)) for name in "abc")
    for request in requests:
        served.device.register(request)
    host.take(Submit(requests))
    served.drain()
    host.close()
    steps = [record.events for record in sent if isinstance(record, Events)]
    assert {event.request_id for events in steps for event in events} == {"a", "b", "c"}
    assert max(len({event.request_id for event in events}) for events in steps) > 1


def test_a_request_that_cannot_be_made_whole_ends_and_leaves_no_hold_behind() -> None:
    held: list[int] = []
    channel = Mock()
    engine: Any = Mock(hold=lambda: held.append(1), release=held.pop)
    host = EngineHost(engine, channel, dict, Mock(side_effect=[ValueError("broken"), Request("b", (1,), 1)]))
    host.take(Submit((Request("a", (1,), 1), Request("b", (1,), 1))))
    host.close()
    assert held == []
    ((end,),) = [record.events for (record,), _ in channel.send.call_args_list if isinstance(record, Events)]
    assert (end.request_id, end.reason, end.message) == ("a", "error", "broken")
    assert [call.args[0].id for call in engine.submit.call_args_list] == ["b"]


def test_facts_are_those_that_admission_reads() -> None:
    executor = toy.serving(groups=2).engine.executor
    facts = ExecutorFacts.of(executor)
    assert (facts.limits, facts.buckets, facts.vocab_size, facts.groups) == (executor.limits, executor.buckets, executor.vocab_size, 2)
