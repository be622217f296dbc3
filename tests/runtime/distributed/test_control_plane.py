"""runtime/distributed/control_plane.py: answers are gathered, and a failure is blamed on the rank that caused it."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from types import SimpleNamespace

import pytest
from support import ranks

from npucompile.graphs.types import Mesh
from npucompile.runtime.distributed import control_plane
from npucompile.runtime.distributed.control_plane import ControlPlane, RankError, error_text
from npucompile.runtime.distributed.messages import encode

STOPPED = "rank 2 was stopped"
MESH = Mesh.parse("dp=2,tp=2")
WAIT_S = 20


class World:
    """A control plane of four ranks, whose other ranks are sockets of the test."""

    def __init__(self, **options):
        pairs = {rank: ranks.connected() for rank in (1, 2, 3)}
        self.far = {rank: far for rank, (_, far) in pairs.items()}
        for far in self.far.values():
            far.settimeout(WAIT_S)
        self.failures = queue.Queue()
        self.control_plane = ControlPlane(MESH, {rank: near for rank, (near, _) in pairs.items()}, on_failure=self.failures.put, **options)

    def close(self):
        self.control_plane.close()
        for far in self.far.values():
            far.close()

    def receive(self, rank):
        return ranks.next_message(self.far[rank])


@pytest.fixture
def make_world():
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(contextlib.closing(World(**options)))


def test_answers_are_gathered_by_rank(make_world):
    world = make_world()
    for rank in (3, 1):
        world.far[rank].sendall(encode("outputs", x=rank))
    answers = world.control_plane.gather([1, 3], "outputs", WAIT_S)
    assert {rank: message.fields["x"] for rank, message in answers.items()} == {1: 1, 3: 3}
    assert world.control_plane.gather([], "outputs", 0.0) == {}
    world.control_plane.check()
    assert world.control_plane.wait_for_failure(0) is None


@pytest.mark.parametrize(
    ("how", "reason"), [(None, "was lost: it closed its connection"), ("killed by SIGKILL", "died: killed by SIGKILL")]
)
def test_a_rank_that_ends_is_named_and_the_others_are_told_to_abort(make_world, how, reason):
    world = make_world(exit_reason=lambda rank: how if rank == 2 else None)
    world.far[2].close()
    with pytest.raises(RankError, match=f"rank 2 of mesh dp=2,tp=2 {reason}; all ranks end") as caught:
        world.control_plane.gather([2], "outputs", WAIT_S)
    assert world.failures.get(timeout=WAIT_S) is world.control_plane.failure
    for rank in (1, 3):
        assert world.receive(rank) == ("abort", {"message": str(caught.value)})
    with pytest.raises(RankError, match="rank 2"):
        world.control_plane.check()


def test_a_lost_rank_is_blamed_before_one_that_noticed(make_world):
    world = make_world()
    world.far[1].sendall(encode("failed", message="connection closed by peer"))
    time.sleep(0.05)
    world.far[3].close()
    assert "rank 3 of mesh dp=2,tp=2 was lost" in str(world.control_plane.concluded_failure())


def test_a_rank_that_reports_its_own_failure_is_blamed(make_world):
    world = make_world()
    world.far[1].sendall(encode("failed", message="decode: no memory"))
    world.far[1].close()
    assert str(world.control_plane.concluded_failure()) == "rank 1 of mesh dp=2,tp=2 failed: decode: no memory; all ranks end"


def test_a_silent_rank_is_blamed_before_those_that_waited_for_it(make_world, monkeypatch):
    world = make_world()
    monkeypatch.setattr(world.control_plane._peers[2], "_received_s", time.monotonic() - 42)
    world.control_plane.fail(0, "decode: timed out", lost=False)
    assert "rank 2 of mesh dp=2,tp=2 was lost: it has been silent for 42 s" in str(world.control_plane.concluded_failure())


def test_a_rank_may_be_late(make_world):
    world = make_world()
    with pytest.raises(RankError, match=r"no outputs from rank 1, 3 within 0.05 s"):
        world.control_plane.gather([1, 3], "outputs", 0.05)


def test_ranks_are_not_late_for_a_rank_0_that_stood_still(make_world, monkeypatch):
    world, times = make_world(), iter([0.0, 120.0])

    def monotonic():
        now_s = next(times, None)
        if now_s == 120.0:
            # It goes on, and reads what has come.
            world.far[1].sendall(encode("outputs", x=1))
        return time.monotonic() if now_s is None else now_s

    monkeypatch.setattr(control_plane, "time", SimpleNamespace(monotonic=monotonic))
    assert world.control_plane.gather([1], "outputs", 1.0)[1].fields == {"x": 1}


def test_an_answer_that_was_not_asked_for_is_a_failure(make_world):
    world = make_world()
    world.far[1].sendall(encode("ready"))
    with pytest.raises(RankError, match=r"rank 1 sent 'ready' where 'outputs' of ranks \[1\] was due"):
        world.control_plane.gather([1], "outputs", WAIT_S)


def test_a_failure_wakes_a_waiting_gather(make_world):
    world, errors = make_world(), queue.Queue()

    def wait():
        try:
            world.control_plane.gather([1], "ready", None)
        except RankError as error:
            errors.put(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    world.far[3].close()
    assert "rank 3" in str(errors.get(timeout=WAIT_S))
    thread.join()


def test_closing_sends_stop_and_is_no_failure(make_world):
    world = make_world()
    world.control_plane.close()
    for rank in (1, 2, 3):
        assert world.receive(rank) == ("stop", {})
    assert world.failures.empty()
    assert world.control_plane.wait_for_failure(0.1) is None


def test_error_text_names_the_type_of_foreign_errors():
    assert error_text(RankError("as it is")) == "as it is"
    assert error_text(ZeroDivisionError("no")) == "ZeroDivisionError: no"


def test_questions_are_answered_beside_the_steps(make_world):
    world, answers = make_world(), queue.Queue()
    for rank, name in ((1, "a"), (2, "b"), (1, "c")):
        world.control_plane.ask(rank, "write", lambda fields, name=name: answers.put((name, fields)), what=name)
    numbers = {}
    for rank in (1, 2, 1):
        message = world.receive(rank)
        assert message.kind == "write"
        numbers[message.fields["what"]] = message.fields["number"]
    assert len(set(numbers.values())) == 3
    # Not in their order, one of them twice, one that nobody asked, and an output between them.
    world.far[1].sendall(encode("answer", number=numbers["c"], reason=""))
    world.far[1].sendall(encode("outputs", step=1))
    for number in (numbers["a"], numbers["a"], 99):
        world.far[1].sendall(encode("answer", number=number, reason="no room"))
    assert list(world.control_plane.gather([1], "outputs", WAIT_S, 1)) == [1]
    assert [answers.get(timeout=WAIT_S)[0] for _ in range(2)] == ["c", "a"]
    world.control_plane.close()
    assert answers.get(timeout=WAIT_S) == ("b", {"reason": STOPPED})
    world.control_plane.ask(2, "write", lambda fields: answers.put(fields))
    assert answers.get(timeout=WAIT_S) == {"reason": STOPPED}
    assert answers.empty()


def test_a_question_to_a_rank_that_lives_is_open_when_another_one_is_lost(make_world):
    world, answers = make_world(), queue.Queue()
    for rank in (1, 2):
        world.control_plane.ask(rank, "write", lambda fields, rank=rank: answers.put((rank, fields["reason"])))
    world.far[2].close()
    assert world.control_plane.wait_for_failure(WAIT_S) is not None
    rank, reason = answers.get(timeout=WAIT_S)
    assert (rank, reason.partition(":")[0]) == (2, "rank 2 was lost")
    assert answers.empty()
    world.far[1].sendall(encode("answer", number=1, reason="aborted"))
    assert answers.get(timeout=WAIT_S) == (1, "aborted")


NODES = {1: "node rank 0 (a at 1)", 2: "node rank 1 (b at 2)", 3: "node rank 1 (b at 2)"}


@pytest.mark.parametrize(
    ("ended", "text", "code"),
    [
        ((2, 3), "node rank 1 (b at 2) with rank 2, 3 of mesh dp=2,tp=2 was lost: it closed its connection; all ranks end", "node_lost"),
        ((3,), "rank 3 of mesh dp=2,tp=2 on node rank 1 (b at 2) was lost: it closed its connection; all ranks end", "rank_lost"),
    ],
)
def test_a_machine_all_of_whose_ranks_are_lost_is_lost_itself(make_world, ended, text, code):
    world = make_world(nodes=NODES)
    for rank in ended:
        world.far[rank].close()
    failure = world.failures.get(timeout=WAIT_S)
    assert str(failure) == f"{text} [{code}]"
    assert failure.code == code


def test_an_error_says_on_which_machine(make_world):
    world = make_world(nodes=NODES)
    world.far[2].sendall(encode("failed", message="out of memory"))
    failure = world.failures.get(timeout=WAIT_S)
    assert str(failure) == "rank 2 of mesh dp=2,tp=2 on node rank 1 (b at 2) failed: out of memory; all ranks end [rank_failed]"
    assert RankError("ranks [0, 1] differ").code == RankError("as [it] is").code == ""
