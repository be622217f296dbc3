"""What a rank does of handovers when rank 0 says so, over a transfer engine of the test."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
from support import ranks

from npucompile.graphs.types import Mesh
from npucompile.runtime.distributed import rank_transfers
from npucompile.runtime.distributed.rank_transfers import MOST_PEERS, RankTransfers
from npucompile.runtime.kv_transfer.layout import Instance, Region, located
from npucompile.runtime.kv_transfer.segments import Segment
from npucompile.runtime.kv_transfer.transfer_engine import RegisteredMemory, TransferError

WAIT_S = 20
KINDS = (("k", True, 4), ("latent", False, 8))


def pools(address: int, split: bool = True) -> tuple[Region, ...]:
    kinds = [kind for kind in KINDS if split or not kind[1]]
    return tuple(
        Region(name, "pages", "int8", (size,), size, size, 9, address + 1000 * place, own) for place, (name, own, size) in enumerate(kinds)
    )


class Transfer:
    """A `TransferEngine` whose writes end when the test says so."""

    def __init__(self, host: str, protocol: str) -> None:
        if host == "nowhere":
            raise TransferError("there is no such host")
        self.session, self.protocol, self.closed = f"{host}:1", protocol, False
        self.written: list[tuple[str, list[Segment]]] = []
        self.results: queue.Queue[str] = queue.Queue()

    def register(self, memory: Sequence[RegisteredMemory]) -> None:
        self.memory = list(memory)

    def write(self, session: str, segments: Sequence[Segment], allowed: Callable[[], bool]) -> Transfer:
        self.written.append((session, list(segments)))
        self.allowed = allowed
        return self

    def reopen(self) -> None:
        self.session += "0"

    def result(self) -> str:
        return self.results.get(timeout=WAIT_S)

    def close(self) -> None:
        self.closed = True


class Executor:
    def __init__(self, regions: tuple[Region, ...]) -> None:
        self.regions, self.areas = regions, tuple(RegisteredMemory(region.address, region.nbytes) for region in regions)

    def enter(self) -> None:
        """All threads have the same memory."""


class Stream(NamedTuple):
    """The connection to rank 0, as far as its addresses matter."""

    here: str
    there: str

    def getsockname(self) -> tuple[str, int]:
        return self.here, 1

    def getpeername(self) -> tuple[str, int]:
        return self.there, 2


class Rank:
    """Rank 3 of two groups of two, so the second one of the second group."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, regions: tuple[Region, ...], rank_0: str = "10.0.0.1") -> None:
        self.engines: list[Transfer] = []
        self.answers: queue.Queue[Mapping[str, Any]] = queue.Queue()
        self.steps: list[Callable[[], None]] = []
        monkeypatch.setattr(rank_transfers, "Mooncake", self.open)
        self.transfers = RankTransfers(Executor(regions), 3, Mesh.parse("dp=2,tp=2"), Stream("10.0.0.1", rank_0), self.answer)

    def open(self, host: str, protocol: str, enter: Callable[[], None]) -> Transfer:
        self.engines.append(Transfer(host, protocol))
        return self.engines[-1]

    def answer(self, number: int, reason: str, **fields: Any) -> None:
        self.answers.put({"number": number, "reason": reason, **fields})

    def tell(self, kind: str, **fields: Any) -> None:
        self.transfers.received(kind, fields, self.steps.append)

    def heard(self) -> Mapping[str, Any]:
        return self.answers.get(timeout=WAIT_S)


def instance(tp: int, count: int, split: bool = True) -> dict[str, Any]:
    ranks = [pools(10_000 * (rank + 1), split) for rank in range(count)]
    return located(Instance("", 16, 0, tp, 64, (), ((),) * tp), ranks).to_json()


def test_a_rank_writes_to_the_rank_of_its_number_once_its_steps_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, pools(500))
    rank.tell("transfer", number=1, host="host", protocol="tcp")
    opened = rank.heard()
    assert opened == {"number": 1, "reason": "", "session": "host:1", "addresses": [500, 1500], "clock_s": opened["clock_s"]}
    (engine,) = rank.engines
    assert (engine.protocol, engine.memory) == ("tcp", [(500, 36), (1500, 72)])
    rank.tell("peer", peer=7, instance=instance(2, 4))
    rank.tell("lease", number=9, lease=4, until_s=opened["clock_s"] + 60)
    assert rank.heard()["clock_s"] >= opened["clock_s"]
    rank.tell("write", number=2, write=2, peer=7, lease=4, group=1, sessions=["c", "d"], pairs={"pages": [[1, 3], [2, 4]]})
    rank.tell("write", number=3, write=3, peer=7, lease=4, group=5, sessions=["c", "d"], pairs={"pages": [[1, 3]]})
    assert (engine.written, rank.answers.empty(), len(rank.steps)) == ([], True, 2)
    rank.steps.pop(0)()
    ranks.eventually(lambda: engine.written)
    assert engine.allowed()
    rank.tell("stop_writing", write=2)
    assert not engine.allowed()
    engine.results.put("the link is down")
    assert rank.heard() == {"number": 2, "reason": "the link is down"}
    rank.tell("stop_writing", write=2)
    # Neighbours at both ends, in one piece.
    assert engine.written == [("d", [(504, 40_012, 8), (1508, 41_024, 16)])]
    rank.steps.pop()()
    assert rank.heard() == {"number": 3, "reason": "dp group 5; legal are 0 to 1"}
    rank.transfers.close()
    assert engine.closed


def test_the_ranks_of_a_group_share_what_all_of_them_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, pools(500, split=False))
    rank.tell("transfer", number=1, host="host", protocol="tcp")
    rank.tell("peer", peer=1, instance=instance(4, 4, split=False))
    rank.tell("write", number=2, write=2, peer=1, lease=4, group=0, sessions=["a", "b", "c", "d"], pairs={"pages": [[1, 3]]})
    rank.steps.pop()()
    for _ in range(4):
        rank.engines[0].results.put("")
    rank.heard()
    assert rank.heard() == {"number": 2, "reason": ""}
    # Of one pool the second rank writes every other target; to the others it writes nothing.
    assert [(session, len(segments)) for session, segments in rank.engines[0].written] == [("a", 0), ("b", 1), ("c", 0), ("d", 1)]
    rank.transfers.close()


def test_writes_in_flight_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, pools(500))
    rank.tell("transfer", number=1, host="host", protocol="tcp")
    for peer in range(MOST_PEERS + 1):
        rank.tell("peer", peer=peer, instance=instance(2, 2))
    assert len(rank.transfers._peers) == MOST_PEERS
    for number in (2, 3):
        rank.tell("write", number=number, write=number, peer=MOST_PEERS, lease=4, group=0, sessions=["a", "b"], pairs={"pages": [[1, 3]]})
        rank.steps.pop()()
        rank.engines[0].results.put("")
    rank.transfers.close()
    rank.heard()
    assert {rank.heard()["number"], rank.heard()["number"]} == {2, 3}


def test_an_engine_that_does_not_start_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, pools(500))
    rank.tell("transfer", number=1, host="nowhere", protocol="tcp")
    assert rank.heard() == {"number": 1, "reason": "there is no such host"}
    rank.transfers.close()


@pytest.mark.parametrize(("rank_0", "session"), [("10.0.0.1", "host:1"), ("10.0.0.2", "10.0.0.1:1")])
def test_a_rank_on_another_machine_than_rank_0_has_its_own_address(monkeypatch: pytest.MonkeyPatch, rank_0: str, session: str) -> None:
    rank = Rank(monkeypatch, pools(500), rank_0)
    rank.tell("transfer", number=1, host="host", protocol="tcp")
    assert rank.heard()["session"] == session
    rank.transfers.close()


def test_without_a_lease_nothing_is_begun_and_a_forgotten_peer_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, pools(500))
    rank.tell("transfer", number=1, host="host", protocol="tcp")
    now_s = rank.heard()["clock_s"]
    rank.tell("peer", peer=1, instance=instance(2, 2))
    rank.tell("write", number=2, write=2, peer=1, lease=4, group=0, sessions=["a", "b"], pairs={"pages": [[1, 3]]})
    rank.tell("lease", number=3, lease=5, until_s=now_s - 1)
    rank.tell("write", number=4, write=4, peer=1, lease=5, group=0, sessions=["a", "b"], pairs={"pages": [[1, 3]]})
    for _ in range(2):
        rank.steps.pop()()
        ranks.eventually(lambda: rank.engines[0].written)
        rank.engines[0].written.clear()
        assert not rank.engines[0].allowed()
        rank.engines[0].results.put("")
    rank.tell("write", number=6, write=6, peer=2, lease=5, group=0, sessions=["a", "b"], pairs={"pages": [[1, 3]]})
    rank.steps.pop()()
    found = {answer["number"]: answer["reason"] for answer in (rank.heard() for _ in range(4))}
    assert found == {2: "", 3: "", 4: "", 6: "rank 3 does not know peer 2"}
    rank.transfers.close()


def test_memory_is_opened_again_under_another_session(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch, pools(500))
    rank.tell("transfer", number=1, host="host", protocol="tcp")
    rank.heard()
    rank.tell("reopen", number=2)
    answer = rank.heard()
    assert (answer["number"], answer["reason"], answer["session"]) == (2, "", "host:10")
    rank.transfers.close()
