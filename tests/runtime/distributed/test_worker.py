"""runtime/distributed/worker.py: a rank runs the steps that rank 0 sends, answers for its group, and ends with a reason."""

from __future__ import annotations

import contextlib
import queue
import threading

import numpy as np
import pytest
from support import ranks

from npucompile.graphs.types import Bucket, Mesh
from npucompile.runtime.distributed.control_plane import RankError
from npucompile.runtime.distributed.messages import encode
from npucompile.runtime.distributed.worker import Worker
from npucompile.runtime.executor import ExecutorError, FinishedStep

BUCKET = Bucket("decode", 2, 1)
WAIT_S = 20


class Executor:
    buckets, run_ahead, missing = (BUCKET,), 0, {Bucket("decode", 1, 1): "no kernel"}

    def __init__(self):
        self.ran = []

    def launch(self, bucket, groups):
        (inputs,) = groups
        self.ran.append(inputs["tokens"].tolist())
        if 13 in inputs["tokens"]:
            raise ZeroDivisionError("unlucky")
        logprobs = np.zeros((2, 1), np.float32)
        outputs = {"tokens": inputs["tokens"] * 2, "counts": np.ones(2, np.int32), "logits": np.zeros(3), "chosen_logprobs": logprobs}
        return FinishedStep([outputs])

    def receive(self, group, numbers, ready):
        self.ran.append(("receive", group, numbers))
        ready()

    def landed(self, group, numbers):
        self.ran.append(("landed", group, numbers))
        if not numbers["pages"]:
            raise ExecutorError("nothing arrived")


class Running:
    """A worker in a thread, and rank 0's end of its connection."""

    def __init__(self, rank, mesh, make=None):
        near, self.stream = ranks.connected()
        self.stream.settimeout(WAIT_S)
        self.ended, self.end_reasons, self.executor = queue.Queue(), queue.Queue(), Executor()
        self.worker = Worker(rank, Mesh.parse(mesh), near, on_end=self.end_reasons.put)
        self.thread = threading.Thread(target=self.serve, args=(make or (lambda: self.executor),), daemon=True)
        self.thread.start()

    def serve(self, make):
        try:
            self.worker.serve(make)
        except RankError as error:
            self.ended.put(str(error))
        else:
            self.ended.put("stopped")

    def send(self, kind, **fields):
        self.stream.sendall(encode(kind, **fields))

    def step(self, number, token, **inputs):
        self.send("step", step=number, bucket=BUCKET.name, inputs={"tokens": np.full((2, 1), token, np.int32), **inputs})

    def receive(self):
        return ranks.next_message(self.stream)

    def end(self):
        return self.ended.get(timeout=WAIT_S)

    def close(self):
        self.worker.close()
        self.stream.close()
        self.thread.join(WAIT_S)


@pytest.fixture
def start_worker():
    with contextlib.ExitStack() as stack:
        yield lambda *options: stack.enter_context(contextlib.closing(Running(*options)))


def test_the_first_of_another_group_answers(start_worker):
    running = start_worker(2, "dp=2,tp=2")
    assert running.receive() == ("ready", {"missing": {"decode-b1-q1": "no kernel"}})
    for number in (1, 2):
        running.step(number, 10 * number)
        answer = running.receive()
        assert (answer.kind, answer.fields["step"], list(answer.fields["outputs"])) == ("outputs", number, ["tokens", "counts"])
        assert answer.fields["outputs"]["tokens"].tolist() == [[20 * number]] * 2
    running.send("stop")
    assert running.end() == "stopped"
    assert running.executor.ran == [[[10]] * 2, [[20]] * 2]
    assert running.end_reasons.empty()


@pytest.mark.parametrize(("rank", "mesh"), [(1, "dp=2,tp=2"), (3, "dp=2,tp=2"), (1, "tp=2")])
def test_other_ranks_run_steps_and_send_nothing(start_worker, rank, mesh):
    running = start_worker(rank, mesh)
    running.receive()
    running.step(1, 5)
    running.send("stop")
    assert running.end() == "stopped"
    assert running.executor.ran == [[[5]] * 2]
    running.worker.close()
    running.stream.settimeout(0.5)
    with pytest.raises((TimeoutError, ConnectionResetError)):
        assert running.receive() is None


class Slow(Executor):
    """Its steps end when the test says so."""

    run_ahead = 1

    def __init__(self):
        super().__init__()
        self.gate = queue.Queue()

    def launch(self, bucket, groups):
        return SlowStep(self.gate, super().launch(bucket, groups))


class SlowStep:
    def __init__(self, gate, finished):
        self.gate, self.finished = gate, finished

    def result(self):
        if error := self.gate.get(timeout=WAIT_S):
            raise error
        return self.finished.result()


def test_the_next_step_is_launched_while_the_last_one_runs_and_answers_come_in_order(start_worker):
    slow = Slow()
    running = start_worker(2, "dp=2,tp=2", lambda: slow)
    running.receive()
    for number in (1, 2):
        running.step(number, number)
    while len(slow.ran) < 2:
        assert running.ended.empty()
    slow.gate.put(None)
    slow.gate.put(None)
    assert [running.receive().fields["step"] for _ in range(2)] == [1, 2]
    running.send("stop")
    assert running.end() == "stopped"


def test_peers_may_write_once_the_steps_before_have_ended(start_worker):
    slow = Slow()
    running = start_worker(2, "dp=2,tp=2", lambda: slow)
    running.receive()
    running.step(1, 1)
    running.send("receive", number=7, numbers={"pages": [3]})
    running.send("landed", numbers={"pages": [4]})
    while len(slow.ran) < 2:
        assert running.ended.empty()
    # What has landed is for the next step to be launched, and the step that runs is none of its business.
    assert slow.ran[1:] == [("landed", 0, {"pages": [4]})]
    slow.gate.put(None)
    assert running.receive().fields["step"] == 1
    assert running.receive() == ("answer", {"number": 7, "reason": ""})
    assert slow.ran[2:] == [("receive", 0, {"pages": [3]})]
    running.send("landed", numbers={"pages": []})
    assert running.receive() == ("failed", {"message": "landed: nothing arrived"})
    assert running.end() == "rank 2 failed: landed: nothing arrived"


def test_a_step_that_fails_after_it_was_launched_is_reported(start_worker):
    slow = Slow()
    running = start_worker(1, "tp=2", lambda: slow)
    running.receive()
    running.step(1, 1)
    slow.gate.put(ZeroDivisionError("unlucky"))
    assert running.receive() == ("failed", {"message": "decode-b2-q1: ZeroDivisionError: unlucky"})
    assert running.end() == "rank 1 failed: decode-b2-q1: ZeroDivisionError: unlucky"


def test_a_bucket_it_does_not_have_is_reported(start_worker):
    running = start_worker(1, "tp=2")
    running.receive()
    running.send("step", step=1, bucket="decode-b9-q1", inputs={})
    assert "decode-b9-q1" in running.receive().fields["message"]
    assert "rank 1 failed: decode-b9-q1" in running.end()


def test_a_failure_to_load_is_reported(start_worker):
    def make():
        raise RankError("no weights")

    running = start_worker(1, "tp=2", make)
    assert running.receive() == ("failed", {"message": "getting ready: no weights"})
    assert running.end() == "rank 1 failed: getting ready: no weights"


def test_the_end_of_rank_0_is_the_end(start_worker):
    running = start_worker(1, "tp=2")
    running.receive()
    running.stream.close()
    assert running.end() == "rank 1 lost rank 0: it closed its connection"
    assert running.end_reasons.get(timeout=WAIT_S) == "rank 1 lost rank 0: it closed its connection"


def test_an_abort_ends_it_with_its_reason(start_worker):
    running = start_worker(1, "tp=2")
    running.receive()
    running.send("abort", message="rank 3 died")
    assert running.end() == "rank 3 died"
    assert running.end_reasons.get(timeout=WAIT_S) == "rank 3 died"


def test_a_busy_worker_is_told_of_the_end_too(start_worker):
    """What the worker waits for may never come; then the callback has to end the process."""
    stuck = threading.Event()
    running = start_worker(1, "tp=2", lambda: stuck.wait(WAIT_S))
    running.stream.close()
    assert "lost rank 0" in running.end_reasons.get(timeout=WAIT_S)
    stuck.set()
    assert running.end()


def test_steps_before_a_stop_are_run_even_when_the_connection_is_closed_behind_it(start_worker):
    running = start_worker(1, "tp=2")
    running.receive()
    for number in range(5):
        running.step(number, number)
    running.send("stop")
    running.stream.close()
    assert running.end() == "stopped"
    assert len(running.executor.ran) == 5
    assert running.end_reasons.empty()
