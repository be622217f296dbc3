"""runtime/distributed/sharded_executor.py: each rank gets its group's inputs, and the engine the outputs of every group."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
from support import ranks

from npucompile.graphs.errors import LoweringError, SpecError
from npucompile.graphs.steps.kind import SegmentSizes
from npucompile.graphs.types import Bucket, Limits, Mesh
from npucompile.runtime.distributed.control_plane import ControlPlane, RankError
from npucompile.runtime.distributed.messages import encode
from npucompile.runtime.distributed.sharded_executor import ShardedExecutor, select_outputs
from npucompile.runtime.executor import FinishedStep

BUCKET, PREFILL = Bucket("decode", 2, 1), Bucket("prefill", 1, 4)
WAIT_S = 20


class Local:
    """Rank 0's own executor, which adds one."""

    buckets, limits, vocab_size, backends = (PREFILL, BUCKET), Limits(4, 9, 9, 16), 13, {BUCKET.name: "eager"}
    error: Exception | None = None
    max_logprobs, max_ranked, run_ahead, missing, recurrent, fixed_tokens, segments = 7, 3, 1, {}, True, 11.0, SegmentSizes(24, 4)

    def launch(self, bucket, inputs):
        if self.error:
            raise self.error
        return FinishedStep([self.outputs(inputs[0]["tokens"])])

    def outputs(self, tokens):
        return {"tokens": tokens + 1, "logits": np.zeros(3)}

    def compiles(self):
        return 5

    def receive(self, group, numbers, ready):
        self.peers = [(group, numbers)]
        ready()

    def landed(self, group, numbers):
        self.peers.append((group, numbers))


class Ranks:
    """The ranks of a mesh; threads of the test play all but rank 0, and each adds a hundred times its rank."""

    def __init__(self, mesh, silent=(), missing=()):
        self.mesh, self.silent, self.received, self.local = Mesh.parse(mesh), silent, {}, Local()
        self.missing, self.told = dict(missing), []
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
        stream.sendall(encode("ready", missing=self.missing.get(rank, {})))
        first_of_group = rank % self.mesh.axis("tp") == 0
        while (message := ranks.next_message(stream)).kind != "stop":
            if message.kind != "step":
                self.told.append((rank, message))
                if message.kind == "receive" and rank not in self.silent:
                    stream.sendall(encode("answer", number=message.fields["number"], reason=""))
                continue
            self.received.setdefault(rank, []).append(message.fields)
            if first_of_group and rank not in self.silent:
                tokens = message.fields["inputs"]["tokens"] + 100 * rank
                stream.sendall(encode("outputs", step=message.fields["step"], outputs={"tokens": tokens}))

    def close(self):
        self.control_plane.close()
        for far in self.far.values():
            far.close()

    def executor(self, **options):
        return ShardedExecutor(self.local, self.control_plane, **{"step_timeout_s": WAIT_S, **options})


@pytest.fixture
def make_cluster():
    with contextlib.ExitStack() as stack:
        yield lambda mesh, **options: stack.enter_context(contextlib.closing(Ranks(mesh, **options)))


def inputs(*values):
    return [{"tokens": np.full((2, 1), value, np.int32)} for value in values]


def run(executor, *inputs):
    return executor.launch(BUCKET, inputs).result()


def test_it_has_the_properties_of_rank_0s_executor(make_cluster):
    executor = make_cluster("dp=2,tp=2").executor()
    assert (executor.buckets, executor.limits, executor.vocab_size, executor.groups) == (Local.buckets, Local.limits, 13, 2)
    assert (executor.max_logprobs, executor.max_ranked, executor.recurrent, executor.fixed_tokens) == (7, 3, True, 11.0)
    assert executor.segments == Local.segments
    assert (executor.run_ahead, executor.backends, executor.compiles(), executor.refresh()) == (1, Local.backends, 5, False)


def test_every_rank_gets_its_groups_inputs_and_every_group_answers_once(make_cluster):
    cluster = make_cluster("dp=3,tp=2")
    executor = cluster.executor()
    for _ in range(2):
        outputs = run(executor, *inputs(10, 20, 30))
        assert [out["tokens"].tolist() for out in outputs] == [[[11]] * 2, [[220]] * 2, [[430]] * 2]
        assert [list(out) for out in outputs] == [["tokens"]] * 3
        executor.control_plane.gather([], "outputs", 1)
    cluster.control_plane.close()
    # Nobody waits for ranks that answer nothing.
    ranks.eventually(lambda: sum(map(len, cluster.received.values())) == 2 * 5)
    for rank, group in {1: 0, 2: 1, 3: 1, 4: 2, 5: 2}.items():
        for step, message in enumerate(cluster.received[rank], start=1):
            assert (message["step"], message["bucket"]) == (step, BUCKET.name)
            assert message["inputs"]["tokens"].tolist() == [[10 * (group + 1)]] * 2


def test_two_steps_in_flight_get_the_outputs_of_each_whoever_answers_first(make_cluster):
    executor = make_cluster("dp=3").executor()
    launched = [executor.launch(BUCKET, inputs(value, value, value)) for value in (1, 2)]
    results = [step.result() for step in launched]
    assert [[out["tokens"][0, 0] for out in outputs] for outputs in results] == [[2, 101, 201], [3, 102, 202]]


def test_the_outputs_of_a_step_that_nobody_read_are_not_taken_for_those_of_the_next(make_cluster):
    executor = make_cluster("dp=2").executor()
    executor.launch(BUCKET, inputs(1, 1))
    assert [out["tokens"][0, 0] for out in run(executor, *inputs(2, 2))] == [3, 102]


def test_no_rank_runs_what_one_of_them_cannot_run(make_cluster):
    small, large, prefill = Bucket("decode", 1, 1), BUCKET, Bucket("prefill", 1, 4)
    cluster = make_cluster("tp=3", missing={2: {small.name: "no kernel"}})
    cluster.local.buckets = (small, large, prefill)
    executor = cluster.executor()
    assert (executor.buckets, executor.missing) == ((large, prefill), {small: "rank 2: no kernel"})


def test_ranks_that_are_left_without_a_kind_of_bucket_cannot_serve(make_cluster):
    cluster = make_cluster("tp=2", missing={1: {BUCKET.name: "no kernel"}})
    cluster.local.buckets = (BUCKET, Bucket("prefill", 1, 4))
    with pytest.raises(LoweringError, match=r"no decode bucket can run.*decode-b2-q1: rank 1: no kernel"):
        cluster.executor()


def test_counts_are_selected_and_log_probabilities_where_a_row_asks(make_cluster):
    outputs = {"tokens": 1, "counts": 2, "drafts": 3, "logits": 4, "chosen_logprobs": 5, "top_ids": 6, "top_logprobs": 7}
    nobody, somebody = {"logprobs": np.zeros(2, np.int32)}, {"logprobs": np.array([0, 1], np.int32)}
    for arrays in ({}, nobody):
        assert select_outputs(("tokens", "counts"), arrays, outputs) == {"tokens": 1, "counts": 2}
    selected = select_outputs(("tokens", "counts"), somebody, outputs)
    assert set(selected) == {"tokens", "counts", "chosen_logprobs", "top_ids", "top_logprobs"}
    # What the next token of a row may be depends on its drafts.
    for name in ("bitmask_rows", "penalty_rows", "seen_rows"):
        assert set(select_outputs(("tokens", "counts"), {name: np.array([0, 1])}, outputs)) == {"tokens", "counts", "drafts"}
    # Prefill has no counts.
    assert select_outputs(("tokens", "counts"), nobody, {"tokens": 1, "logits": 4}) == {"tokens": 1}
    # Rank 0's own outputs are selected in the same way.
    cluster = make_cluster("tp=2")
    cluster.local.outputs = lambda tokens: outputs
    executor = cluster.executor()
    assert set(run(executor, inputs(1)[0] | somebody)[0]) == set(selected)
    assert set(run(executor, inputs(1)[0] | nobody)[0]) == {"tokens", "counts"}


def test_one_group_needs_no_answers(make_cluster):
    executor = make_cluster("tp=3").executor(outputs=("tokens", "logits"))
    (outputs,) = run(executor, *inputs(5))
    assert (outputs["tokens"].tolist(), outputs["logits"].shape) == ([[6]] * 2, (3,))


def test_what_cannot_be_run_is_refused_and_sent_to_nobody(make_cluster):
    cluster = make_cluster("dp=2")
    executor = cluster.executor()
    with pytest.raises(SpecError, match="no bucket decode-b9-q1; the artifact has prefill-b1-q4, decode-b2-q1"):
        executor.launch(Bucket("decode", 9, 1), inputs(1, 2))
    with pytest.raises(SpecError, match="inputs for 1 dp groups; the executor has 2"):
        run(executor, *inputs(1))
    assert cluster.received == {}
    assert run(executor, *inputs(1, 2))[1]["tokens"].tolist() == [[102]] * 2


def test_a_rank_that_is_not_ready_ends_the_wait(make_cluster):
    cluster = make_cluster("tp=2")
    cluster.far[1].sendall(encode("failed", message="getting ready: no weights"))
    assert "rank 1 of mesh tp=2 failed: getting ready: no weights" in str(cluster.control_plane.concluded_failure())
    with pytest.raises(RankError, match="no weights"):
        cluster.executor()


def test_a_rank_that_dies_in_a_step_is_named(make_cluster):
    cluster = make_cluster("dp=2", silent=(1,))
    executor = cluster.executor()
    threading.Timer(0.2, cluster.far[1].shutdown, (2,)).start()
    with pytest.raises(RankError, match="rank 1 of mesh dp=2 was lost"):
        run(executor, *inputs(1, 2))
    with pytest.raises(RankError, match="rank 1"):
        executor.refresh()
    with pytest.raises(RankError, match="rank 1"):
        run(executor, *inputs(1, 2))


def test_an_error_on_rank_0_is_blamed_on_the_rank_that_caused_it(make_cluster):
    """A collective fails on rank 0 because rank 1 has died; rank 1 is the one to name."""
    cluster = make_cluster("tp=2")
    executor = cluster.executor()
    cluster.far[1].shutdown(2)
    cluster.local.error = RuntimeError("Connection closed by peer")
    with pytest.raises(RankError, match="rank 1 of mesh tp=2 was lost: it closed its connection"):
        run(executor, *inputs(1))


def test_an_error_of_rank_0_ends_all(make_cluster):
    cluster = make_cluster("tp=2")
    executor = cluster.executor()
    cluster.local.error = ZeroDivisionError("no")
    with pytest.raises(RankError, match="rank 0 of mesh tp=2 failed: decode-b2-q1: ZeroDivisionError: no; all ranks end"):
        run(executor, *inputs(1))


def test_a_rank_that_does_not_answer_is_named(make_cluster):
    executor = make_cluster("dp=3", silent=(2,)).executor(step_timeout_s=0.2)
    with pytest.raises(RankError, match=r"no outputs from rank 2 within 0.2 s"):
        run(executor, *inputs(1, 2, 3))


NUMBERS = {"pages": (3, 4), "slots": (1,)}
SENT = {"pages": [3, 4], "slots": [1]}


@pytest.mark.parametrize("group", [0, 1])
def test_peers_may_write_when_all_ranks_of_the_group_say_so(make_cluster, group):
    cluster, ready = make_cluster("dp=2,tp=2"), threading.Event()
    executor = cluster.executor()
    executor.receive(group, NUMBERS, ready.set)
    assert ready.wait(WAIT_S)
    executor.landed(group, NUMBERS)
    own = [rank for rank in (2 * group, 2 * group + 1) if rank]
    ranks.eventually(lambda: len(cluster.told) == 2 * len(own))
    assert sorted((rank, message.kind, message.fields["numbers"]) for rank, message in cluster.told) == [
        (rank, kind, SENT) for rank in own for kind in ("landed", "receive")
    ]
    assert getattr(cluster.local, "peers", []) == ([(0, NUMBERS)] * 2 if not group else [])


def test_peers_may_not_write_where_a_rank_says_nothing_or_is_lost(make_cluster):
    cluster, ready = make_cluster("tp=3", silent=(2,)), threading.Event()
    executor = cluster.executor()
    executor.receive(0, NUMBERS, ready.set)
    ranks.eventually(lambda: len(cluster.told) == 2)
    assert not ready.is_set()
    cluster.far[2].shutdown(2)
    assert executor.control_plane.wait_for_failure(WAIT_S) is not None
    cluster.control_plane.close()
    assert not ready.is_set()
