"""runtime/distributed/worker.py: a rank does what rank 0 says, answers where it is to, and ends with a reason."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from support import ranks

from npucompile.graphs.types import Bucket
from npucompile.runtime.distributed.control_plane import RankError
from npucompile.runtime.distributed.messages import encode, receive
from npucompile.runtime.distributed.worker import Worker
from npucompile.runtime.executor import FinishedStep

BUCKET = Bucket("decode", 2, 1)
WAIT_S = 20


class Executor:
    buckets = (BUCKET,)

    def __init__(self, mesh):
        self.artifact = SimpleNamespace(manifest=SimpleNamespace(mesh=mesh))
        self.ran = []

    def launch(self, bucket, groups):
        (inputs,) = groups
        self.ran.append(inputs["tokens"].tolist())
        if 13 in inputs["tokens"]:
            raise ZeroDivisionError("unlucky")
        told = np.zeros((2, 1), np.float32)
        outputs = {"tokens": inputs["tokens"] * 2, "counts": np.ones(2, np.int32), "logits": np.zeros(3), "chosen_logprobs": told}
        return FinishedStep([outputs])


class Running:
    """A worker in a thread, and rank 0's end of its link."""

    def __init__(self, rank, mesh, make=None):
        near, self.stream = ranks.connected()
        self.stream.settimeout(WAIT_S)
        self.ended, self.told, self.executor = queue.Queue(), queue.Queue(), Executor(mesh)
        self.worker = Worker(rank, near, on_end=self.told.put)
        self.thread = threading.Thread(target=self.serve, args=(make or (lambda: self.executor),), daemon=True)
        self.thread.start()

    def serve(self, make):
        try:
            self.worker.serve(make)
        except RankError as error:
            self.ended.put(str(error))
        else:
            self.ended.put("stopped")

    def say(self, kind, **fields):
        self.stream.sendall(encode(kind, **fields))

    def step(self, number, token, **inputs):
        self.say("step", step=number, bucket=BUCKET.name, inputs={"tokens": np.full((2, 1), token, np.int32), **inputs})

    def hears(self):
        while (message := receive(self.stream)).kind == "heartbeat":
            pass
        return message

    def end(self):
        return self.ended.get(timeout=WAIT_S)


@pytest.fixture
def running():
    made = []

    def start(rank, mesh, make=None):
        made.append(Running(rank, mesh, make))
        return made[-1]

    yield start
    for one in made:
        one.worker.close()
        one.stream.close()
        one.thread.join(WAIT_S)


def test_the_first_of_another_group_answers(running):
    one = running(2, "dp=2,tp=2")
    assert one.hears() == ("ready", {})
    for number in (1, 2):
        one.step(number, 10 * number)
        answer = one.hears()
        assert (answer.kind, answer.fields["step"], list(answer.fields["outputs"])) == ("outputs", number, ["tokens", "counts"])
        assert answer.fields["outputs"]["tokens"].tolist() == [[20 * number]] * 2
    one.say("stop")
    assert one.end() == "stopped"
    assert one.executor.ran == [[[10]] * 2, [[20]] * 2]
    assert one.told.empty()


def test_log_probabilities_are_answered_where_a_row_asked(running):
    one = running(2, "dp=2,tp=2")
    one.hears()
    for asked in ([0, 0], [0, 1]):
        one.step(1, 5, logprobs=np.array(asked, np.int32))
        assert ("chosen_logprobs" in one.hears().fields["outputs"]) == any(asked)
    one.say("stop")
    assert one.end() == "stopped"


@pytest.mark.parametrize(("rank", "mesh"), [(1, "dp=2,tp=2"), (3, "dp=2,tp=2"), (1, "tp=2")])
def test_the_others_run_and_are_quiet(running, rank, mesh):
    one = running(rank, mesh)
    one.hears()
    one.step(1, 5)
    one.say("stop")
    assert one.end() == "stopped"
    assert one.executor.ran == [[[5]] * 2]
    one.worker.close()
    one.stream.settimeout(0.5)
    with pytest.raises((TimeoutError, ConnectionResetError)):
        assert one.hears() is None


def test_a_step_that_fails_is_told(running):
    one = running(1, "tp=2")
    one.hears()
    one.step(1, 13)
    assert one.hears() == ("failed", {"message": "decode-b2-q1: ZeroDivisionError: unlucky"})
    assert one.end() == "rank 1 failed: decode-b2-q1: ZeroDivisionError: unlucky"


def test_a_bucket_it_does_not_have_is_told(running):
    one = running(1, "tp=2")
    one.hears()
    one.say("step", step=1, bucket="decode-b9-q1", inputs={})
    assert "decode-b9-q1" in one.hears().fields["message"]
    assert "rank 1 failed: decode-b9-q1" in one.end()


def test_what_it_cannot_load_is_told(running):
    def make():
        raise RankError("no weights")

    one = running(1, "tp=2", make)
    assert one.hears() == ("failed", {"message": "getting ready: no weights"})
    assert one.end() == "rank 1 failed: getting ready: no weights"


def test_the_end_of_rank_0_is_the_end(running):
    one = running(1, "tp=2")
    one.hears()
    one.stream.close()
    assert one.end() == "rank 1 lost rank 0: it closed its connection"
    assert one.told.get(timeout=WAIT_S) == "rank 1 lost rank 0: it closed its connection"


def test_an_abort_ends_it_with_its_reason(running):
    one = running(1, "tp=2")
    one.hears()
    one.say("abort", message="rank 3 died")
    assert one.end() == "rank 3 died"
    assert one.told.get(timeout=WAIT_S) == "rank 3 died"


def test_who_is_busy_hears_of_the_end_too(running):
    """What it waits for may never come; the callback is what ends the process then."""
    stuck = threading.Event()
    one = running(1, "tp=2", lambda: stuck.wait(WAIT_S))
    one.stream.close()
    assert "lost rank 0" in one.told.get(timeout=WAIT_S)
    stuck.set()
    assert one.end()


def test_steps_before_a_stop_are_run_even_when_the_connection_is_closed_behind_it(running):
    one = running(1, "tp=2")
    one.hears()
    for number in range(5):
        one.step(number, number)
    one.say("stop")
    one.stream.close()
    assert one.end() == "stopped"
    assert len(one.executor.ran) == 5
    assert one.told.empty()
