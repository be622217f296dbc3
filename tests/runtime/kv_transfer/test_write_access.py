"""Rooms that are granted, released and revoked in every order, beside writers that write whenever they like."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from npucompile.runtime.kv_transfer.lease import LEASE_S
from npucompile.runtime.kv_transfer.write_access import AGAIN_S, QUIET_S, WriteAccess


class Server:
    """Pools whose sessions are numbers, and the rooms that were told one."""

    def __init__(self) -> None:
        self.now_s, self.session = 0.0, 0
        self.calls: deque[Callable[[], None]] = deque()
        self.opening: Callable[[str], None] | None = None
        self.access = WriteAccess(self, self.calls.append, lambda: self.now_s)
        self.granted: dict[int, int] = {}
        self.asked: list[int] = []
        self.revoked: dict[int, bool] = {}

    def reopen(self, done: Callable[[str], None]) -> None:
        assert self.opening is None
        self.opening, self.session = done, -1

    def opened(self, reason: str = "") -> None:
        """The engine is open under a session that there never was, or is not."""
        done, self.opening = self.opening, None
        if not reason:
            self.session = len(self.asked) + len(self.revoked) + int(1e6 * (self.now_s + 1))
        assert done is not None
        done(reason)

    def grant(self) -> None:
        room = len(self.asked)
        self.asked.append(room)
        self.access.grant(room, lambda: self.granted.update({room: self.session}))

    def revoke(self, room: int) -> None:
        self.revoked[room] = False
        self.access.revoke(room, lambda: self.freed(room))

    def freed(self, room: int) -> None:
        self.revoked[room] = True
        assert self.granted.get(room) != self.session, "its writer, stopped until now, can write to pages of others"

    def run(self) -> None:
        while self.calls:
            self.calls.popleft()()


@given(st.lists(st.tuples(st.sampled_from(["grant", "release", "revoke", "open", "fail", "wait", "run"]), st.integers(0, 30)), max_size=40))
def test_pages_are_free_once_their_writer_cannot_reach_them(moves: list[tuple[str, int]]) -> None:
    server = Server()
    for move, number in moves:
        known = [room for room in server.asked if room not in server.revoked]
        if move == "grant":
            server.grant()
        elif move in ("release", "revoke") and known:
            room = known[number % len(known)]
            if move == "revoke":
                server.revoke(room)
            elif room in server.granted:
                # One that has ended by itself holds nothing that could be revoked.
                server.revoked[room] = True
                server.access.release(room)
        elif move in ("open", "fail") and server.opening:
            server.opened("" if move == "open" else "no port")
        elif move == "wait":
            server.now_s += number / 10
            server.access.tick()
        elif move == "run":
            server.run()
    for _ in range(4):
        server.run()
        if server.opening:
            server.opened()
            server.run()
        server.now_s += QUIET_S + AGAIN_S + LEASE_S
        server.access.tick()
    assert all(server.revoked.values())
    assert all(room in server.granted or room in server.revoked for room in server.asked)


def test_others_may_end_before_the_memory_is_closed() -> None:
    server = Server()
    for _ in range(3):
        server.grant()
    server.revoke(0)
    assert server.opening is None
    server.grant()
    server.access.release(1)
    assert server.opening is None
    assert 3 not in server.granted
    server.access.release(2)
    assert server.opening is not None
    server.opened()
    server.run()
    assert server.granted[3] == server.session
    assert not server.revoked[0], "its lease is not over"
    server.now_s = LEASE_S
    server.access.tick()
    assert server.revoked[0]


def test_others_that_do_not_end_are_not_waited_for() -> None:
    server = Server()
    server.grant()
    server.grant()
    server.revoke(0)
    server.now_s = QUIET_S
    server.access.tick()
    assert server.opening is not None
    # It had the old session too.
    server.revoke(1)
    server.opened()
    server.run()
    server.now_s += LEASE_S
    server.access.tick()
    assert server.revoked == {0: True, 1: True}
    assert server.opening is None
