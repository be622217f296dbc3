"""Two servers with one room each, between them messages, writes, cuts and timers in every order that a random scheduler finds."""

from __future__ import annotations

import math
from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.runtime.kv_transfer.room import Do, Kind, RoomEvent, RoomStage, Timeouts, begin_decode, begin_prefill, decode, prefill

TIMEOUTS = Timeouts()
TO_DECODE = {Do.SEND_COMPUTED: Kind.COMPUTED, Do.SEND_DONE: Kind.DONE, Do.SEND_FAILED: Kind.FAILED, Do.SEND_GONE: Kind.GONE}
TO_PREFILL = {Do.SEND_READY: Kind.READY, Do.SEND_ABORT: Kind.ABORT}


class Pair:
    """Both servers, what is on its way between them, and what their engines are doing."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.p, self.d = begin_prefill(0.0, TIMEOUTS), begin_decode(0.0, TIMEOUTS)
        self.to_p, self.to_d = deque[Kind](), deque[Kind]()
        self.connected = self.p_lives = True
        self.computing, self.writing, self.reserving = True, False, False
        self.p_pages = self.d_pages = False
        # A writer whose access was revoked goes on for ever, and nothing that it writes arrives.
        self.revoking, self.access = False, True
        self.outcomes = Counter[Do]()

    def prefill(self, kind: Kind, reason: str = "") -> None:
        self.p, todo = prefill(self.p, RoomEvent(kind, self.now_s, reason), TIMEOUTS)
        for do in todo:
            if do in TO_DECODE:
                if self.connected:
                    self.to_d.append(TO_DECODE[do])
            elif do is Do.STOP:
                assert self.computing
                self.computing = False
            elif do is Do.WRITE:
                assert self.p_pages
                assert not self.writing
                self.writing = True
            elif do is not Do.STOP_WRITING:
                assert do is Do.FREE
                assert not self.writing, "a page is freed that a write reads"
                assert self.p_pages
                self.p_pages = False
        assert self.p.holds == self.p_pages

    def decode(self, kind: Kind, reason: str = "") -> None:
        self.d, todo = decode(self.d, RoomEvent(kind, self.now_s, reason), TIMEOUTS)
        for do in todo:
            if do in TO_PREFILL:
                if self.connected:
                    self.to_p.append(TO_PREFILL[do])
            elif do is Do.RESERVE:
                self.reserving = True
            elif do is Do.FREE:
                assert not (self.writing and self.access), "a page is freed that a write may write to"
                assert self.d_pages
                self.d_pages = False
            elif do is Do.REVOKE:
                assert not self.revoking
                self.revoking = True
            else:
                assert do in (Do.RUN, Do.GIVE_UP)
                if do is Do.RUN:
                    assert self.d_pages
                    self.d_pages = False
                self.outcomes[do] += 1
        assert self.d.holds == self.d_pages

    def moves(self) -> dict[str, object]:
        """What may happen next, by name."""
        moves: dict[str, object] = {}
        if self.computing and self.p_lives:
            moves["prefilled"], moves["not prefilled"] = self._prefilled, self._not_prefilled
        if self.writing:
            moves["written"] = lambda: self._written(Kind.WRITTEN)
            moves["not written"] = lambda: self._written(Kind.NOT_WRITTEN)
        if self.reserving:
            moves["reserved"] = self._reserved
        if self.revoking:
            moves["revoked"] = self._revoked
        if self.to_p:
            moves["to prefill"] = self._to_p
            moves["to prefill twice"] = lambda: self.to_p.append(self.to_p[-1])
        if self.to_d:
            moves["to decode"] = self._to_d
            moves["to decode twice"] = lambda: self.to_d.append(self.to_d[-1])
        if self.connected:
            moves["cut"] = self._cut
        if self.p_lives:
            moves["prefill server dies"] = self._die
            moves["its client leaves"] = lambda: self.prefill(Kind.CANCELLED)
        moves["client leaves"] = lambda: self.decode(Kind.CANCELLED)
        if self.next_s < math.inf:
            moves["wait"] = self._wait
        return moves

    @property
    def next_s(self) -> float:
        return min(self.p.deadline_s if self.p_lives else math.inf, self.d.deadline_s)

    def _prefilled(self) -> None:
        self.computing, self.p_pages = False, True
        self.prefill(Kind.PREFILLED)

    def _not_prefilled(self) -> None:
        self.computing = False
        self.prefill(Kind.NOT_PREFILLED, "the prompt is too long")

    def _written(self, kind: Kind) -> None:
        self.writing = False
        if self.p_lives:
            self.prefill(kind, "the peer is lost")

    def _reserved(self) -> None:
        self.reserving, self.d_pages = False, True
        self.decode(Kind.RESERVED)

    def _revoked(self) -> None:
        self.revoking, self.access = False, False
        self.decode(Kind.REVOKED)

    def _to_p(self) -> None:
        kind = self.to_p.popleft()
        if self.p_lives:
            self.prefill(kind)

    def _to_d(self) -> None:
        self.decode(self.to_d.popleft(), "refused")

    def _cut(self) -> None:
        self.connected = False
        self.to_p.clear()
        self.to_d.clear()
        if self.p_lives:
            self.prefill(Kind.DISCONNECTED)
        self.decode(Kind.DISCONNECTED)

    def _die(self) -> None:
        """Its process ends or stands still, and its writes with it: they may go on at any time."""
        self.p_lives = self.computing = self.p_pages = False
        if self.connected:
            self._cut()

    def _wait(self) -> None:
        self.now_s = self.next_s
        if self.p_lives and self.p.deadline_s <= self.now_s:
            self.prefill(Kind.TIMEOUT)
        if self.d.deadline_s <= self.now_s:
            self.decode(Kind.TIMEOUT)

    def go_on(self) -> bool:
        """What happens where nobody interferes: what is on its way arrives, engines end, and timers fire."""
        moves = self.moves()
        quiet = [name for name in ("to prefill", "to decode", "prefilled", "reserved", "revoked", "written", "wait") if name in moves]
        if quiet:
            moves[quiet[0]]()
        return bool(quiet)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2**16)), min_size=1, max_size=12))
def test_nothing_is_held_lost_or_twice(choices: list[tuple[int, int]]) -> None:
    pair = Pair()
    for quiet_moves, choice in choices:
        for _ in range(quiet_moves):
            pair.go_on()
        moves = pair.moves()
        moves[sorted(moves)[choice % len(moves)]]()
    for _ in range(200):
        if not pair.go_on():
            break
    assert pair.outcomes.total() == 1
    assert pair.d.stage in (RoomStage.LANDED, RoomStage.ENDED)
    assert (pair.p_pages, pair.d_pages, pair.revoking) == (False, False, False)
    assert not pair.p_lives or pair.p.stage is RoomStage.ENDED
    assert (pair.outcomes[Do.RUN] == 1) == (pair.d.stage is RoomStage.LANDED)
    assert bool(pair.d.reason) == (pair.d.stage is RoomStage.ENDED)


@pytest.mark.parametrize("last", [Kind.GONE, Kind.DONE, Kind.FAILED, Kind.REVOKED])
@pytest.mark.parametrize("first", [Kind.TIMEOUT, Kind.DISCONNECTED])
def test_a_prefill_server_that_says_nothing_keeps_its_target_until_it_speaks_or_can_write_no_more(first, last):
    pair = Pair()
    for name in ("prefilled", "to decode", "reserved", "to prefill", "client leaves"):
        pair.moves()[name]()
    pair.decode(first)
    assert (pair.d.stage, pair.revoking, pair.d_pages) == (RoomStage.REVOKING, True, True)
    pair.decode(Kind.DISCONNECTED)
    assert pair.d_pages
    pair.writing = False
    pair.decode(last)
    assert (pair.d.stage, pair.d_pages) == (RoomStage.ENDED, False)
