"""runtime/idle_memory.py: what was free for a while is given back once, and no step in flight or request needs it."""

from __future__ import annotations

from support import toy_device as toy

from npucompile.runtime.idle_memory import UNUSED_S, IdleMemory
from npucompile.runtime.request import Request


class Manager:
    def __init__(self, *unused):
        self.unused = list(unused)

    def take_unused(self):
        return {"pages": self.unused.pop(0), "slots": ()}


class Executor:
    def __init__(self):
        self.given = []

    def give_back(self, numbers):
        self.given.append(numbers)


def test_it_is_given_back_when_it_is_time_and_there_is_something():
    now, executor = [0.0], Executor()
    memory = IdleMemory(executor, [Manager((), (3, 4), ()), Manager((), (), ())], lambda: now[0])
    for now[0] in (1.0, UNUSED_S - 1, UNUSED_S, 2 * UNUSED_S - 1, 2 * UNUSED_S, 3 * UNUSED_S):
        memory.when_due(busy=True)
        memory.when_due(busy=False)
    assert executor.given == [[{"pages": (3, 4), "slots": ()}, {"pages": (), "slots": ()}]]


def test_an_engine_gives_back_what_its_requests_had_and_serves_the_same_again():
    """The device refuses pages and slots that have an owner, loses what is given back, and checks what steps read."""
    now = [0.0]
    served = toy.serving(groups=2, clock=lambda: now[0])
    wanted = None
    for turn in range(3):
        asked = [Request(f"{turn}-{i}", (5, 6, 7, 8, 9), 6) for i in range(4)]
        sinks = [served.submit(request) for request in asked]
        served.drain()
        tokens = [sink.tokens for sink in sinks]
        assert tokens == (wanted := wanted or tokens)
        for _ in range(3):
            now[0] += UNUSED_S
            served.engine.step()
        assert all(memory.given_back["slots"] > 0 for memory in served.device.memories)
        assert all(memory.given_back["pages"] > 0 for memory in served.device.memories)
        given = [dict(memory.given_back) for memory in served.device.memories]
        now[0] += UNUSED_S
        served.engine.step()
        assert [dict(memory.given_back) for memory in served.device.memories] == given, "once is enough"
