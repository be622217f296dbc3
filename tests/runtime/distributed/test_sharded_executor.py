"""runtime/distributed/sharded_executor.py: ranks get their group's inputs, the engine every group's outputs; a lost rank ends it."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
from support import ranks

from npucompile.graphs.errors import SpecError
from npucompile.graphs.types import Bucket, Limits, Mesh
from npucompile.runtime.distributed.control_plane import ControlPlane, RankError
from npucompile.runtime.distributed.messages import encode, receive
from npucompile.runtime.distributed.sharded_executor import ShardedExecutor, select_outputs
from npucompile.runtime.executor import FinishedStep

BUCKET = Bucket("decode", 2, 1)
WAIT_S = 20


class Local:
    """Rank 0's own part: adds one."""

    buckets, limits, vocab_size, backends = (BUCKET,), Limits(4, 9, 9, 16), 13, {BUCKET.name: "eager"}
    error: Exception | None = None
    max_logprobs = 7

    def launch(self, bucket, inputs):
        if self.error:
            raise self.error
        return FinishedStep([self.outputs(inputs[0]["tokens"])])

    def outputs(self, tokens):
        return {"tokens": tokens + 1, "logits": np.zeros(3)}

    def compiles(self):
        return 5


class Ranks:
    """Ranks of a mesh, those but 0 played by threads of the test: each adds a hundred times its rank."""

    def __init__(self, mesh, silent=()):
        self.mesh, self.silent, self.seen, self.local = Mesh.parse(mesh), silent, {}, Local()
        pairs = {rank: ranks.connected() for rank in range(1, self.mesh.size)}
        self.far = {rank: far for rank, (_, far) in pairs.items()}
        self.control_plane = ControlPlane(self.mesh, {rank: near for rank, (near, _) in pairs.items()})
        for rank in self.far:
            threading.Thread(target=self.play, args=(rank,), daemon=True).start()

    def play(self, rank):
        with contextlib.suppress(OSError):
            self.play_until_stopped(rank, self.far[rank])

    def play_until_stopped(self, rank, stream):
        stream.settimeout(WAIT_S)
        stream.sendall(encode("ready"))
        first_of_group = rank % self.mesh.axis("tp") == 0
        while (message := receive(stream)).kind in ("step", "heartbeat"):
            if message.kind == "heartbeat":
                continue
            self.seen.setdefault(rank, []).append(message.fields)
            if first_of_group and rank not in self.silent:
                tokens = message.fields["inputs"]["tokens"] + 100 * rank
                stream.sendall(encode("outputs", step=message.fields["step"], outputs={"tokens": tokens}))

    def executor(self, **options):
        return ShardedExecutor(self.local, self.control_plane, **{"step_timeout_s": WAIT_S, **options})


@pytest.fixture
def cluster():
    made = []

    def make(mesh, **options):
        made.append(Ranks(mesh, **options))
        return made[-1]

    yield make
    for one in made:
        one.control_plane.close()
        for far in one.far.values():
            far.close()


def inputs(*values):
    return [{"tokens": np.full((2, 1), value, np.int32)} for value in values]


def run(executor, *inputs):
    return executor.launch(BUCKET, inputs).result()


def test_it_is_what_rank_0_is(cluster):
    executor = cluster("dp=2,tp=2").executor()
    assert (executor.buckets, executor.limits, executor.vocab_size, executor.groups) == ((BUCKET,), Local.limits, 13, 2)
    assert executor.max_logprobs == 7
    assert (executor.run_ahead, executor.backends, executor.compiles(), executor.refresh()) == (0, Local.backends, 5, False)


def test_every_rank_gets_its_groups_inputs_and_every_group_answers_once(cluster):
    one = cluster("dp=3,tp=2")
    executor = one.executor()
    for _ in range(2):
        outputs = run(executor, *inputs(10, 20, 30))
        assert [out["tokens"].tolist() for out in outputs] == [[[11]] * 2, [[220]] * 2, [[430]] * 2]
        assert [list(out) for out in outputs] == [["tokens"]] * 3
        executor.control_plane.gather([], "outputs", 1)
    one.control_plane.close()
    for rank, group in {1: 0, 2: 1, 3: 1, 4: 2, 5: 2}.items():
        for step, seen in enumerate(one.seen[rank], start=1):
            assert (seen["step"], seen["bucket"]) == (step, BUCKET.name)
            assert seen["inputs"]["tokens"].tolist() == [[10 * (group + 1)]] * 2


def test_counts_are_selected_and_log_probabilities_where_a_row_asks(cluster):
    said = {"tokens": 1, "counts": 2, "drafts": 3, "logits": 4, "chosen_logprobs": 5, "top_ids": 6, "top_logprobs": 7}
    nobody, somebody = {"logprobs": np.zeros(2, np.int32)}, {"logprobs": np.array([0, 1], np.int32)}
    for arrays in ({}, nobody):
        assert select_outputs(("tokens", "counts"), arrays, said) == {"tokens": 1, "counts": 2}
    selected = select_outputs(("tokens", "counts"), somebody, said)
    assert set(selected) == {"tokens", "counts", "chosen_logprobs", "top_ids", "top_logprobs"}
    # Prefill counts nothing.
    assert select_outputs(("tokens", "counts"), nobody, {"tokens": 1, "logits": 4}) == {"tokens": 1}
    # What rank 0 runs itself is cut in the same way.
    one = cluster("tp=2")
    one.local.outputs = lambda tokens: said
    executor = one.executor()
    assert set(run(executor, inputs(1)[0] | somebody)[0]) == set(selected)
    assert set(run(executor, inputs(1)[0] | nobody)[0]) == {"tokens", "counts"}


def test_one_group_needs_no_answers(cluster):
    executor = cluster("tp=3").executor(outputs=("tokens", "logits"))
    (found,) = run(executor, *inputs(5))
    assert (found["tokens"].tolist(), found["logits"].shape) == ([[6]] * 2, (3,))


def test_what_cannot_be_run_is_refused_and_nobody_is_asked(cluster):
    one = cluster("dp=2")
    executor = one.executor()
    with pytest.raises(SpecError, match="no bucket decode-b9-q1; the artifact has decode-b2-q1"):
        executor.launch(Bucket("decode", 9, 1), inputs(1, 2))
    with pytest.raises(SpecError, match="inputs for 1 dp groups; the executor has 2"):
        run(executor, *inputs(1))
    assert one.seen == {}
    assert run(executor, *inputs(1, 2))[1]["tokens"].tolist() == [[102]] * 2


def test_a_rank_that_is_not_ready_ends_the_wait(cluster):
    one = cluster("tp=2")
    one.far[1].sendall(encode("failed", message="getting ready: no weights"))
    assert "rank 1 of mesh tp=2 failed: getting ready: no weights" in str(one.control_plane.concluded_failure())
    with pytest.raises(RankError, match="no weights"):
        one.executor()


def test_a_rank_that_dies_in_a_step_is_named(cluster):
    one = cluster("dp=2", silent=(1,))
    executor = one.executor()
    threading.Timer(0.2, one.far[1].shutdown, (2,)).start()
    with pytest.raises(RankError, match="rank 1 of mesh dp=2 was lost"):
        run(executor, *inputs(1, 2))
    with pytest.raises(RankError, match="rank 1"):
        executor.refresh()
    with pytest.raises(RankError, match="rank 1"):
        run(executor, *inputs(1, 2))


def test_an_error_here_is_blamed_on_who_caused_it(cluster):
    """A collective fails on rank 0 because rank 1 has died: that is rank 1's failure."""
    one = cluster("tp=2")
    executor = one.executor()
    one.far[1].shutdown(2)
    one.local.error = RuntimeError("Connection closed by peer")
    with pytest.raises(RankError, match="rank 1 of mesh tp=2 was lost: it closed its connection"):
        run(executor, *inputs(1))


def test_an_error_of_rank_0_ends_all(cluster):
    one = cluster("tp=2")
    executor = one.executor()
    one.local.error = ZeroDivisionError("no")
    with pytest.raises(RankError, match="rank 0 of mesh tp=2 failed: decode-b2-q1: ZeroDivisionError: no; all ranks end"):
        run(executor, *inputs(1))


def test_a_rank_that_does_not_answer_is_named(cluster):
    executor = cluster("dp=3", silent=(2,)).executor(step_timeout_s=0.2)
    with pytest.raises(RankError, match=r"no outputs from rank 2 within 0.2 s"):
        run(executor, *inputs(1, 2, 3))
