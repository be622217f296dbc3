"""runtime/engine.py: the thread that steps serves whoever asks, and ends what it cannot serve."""

from __future__ import annotations

import queue
import threading

import pytest
from support import toy_device as toy

from npucompile.graphs.errors import ArtifactError, RequestError
from npucompile.runtime.distributed.control_plane import RankError
from npucompile.runtime.engine import Engine
from npucompile.runtime.journal import Journal
from npucompile.runtime.request import FinishEvent, Request, Sampling, TokenEvent
from npucompile.runtime.scheduler.pools import OwnershipError

WAIT_S = 60


def ask(name="a", prompt=(1, 2, 3), max_tokens=5, seed=0, stop=(), logprobs=None, speculative_tokens=None, **sampling):
    return Request(name, tuple(prompt), max_tokens, Sampling(seed=seed, **sampling), frozenset(stop), logprobs, speculative_tokens)


class Lost:
    """A step that ends with a rank lost."""

    def result(self):
        raise RankError("rank 1 died")


def losing(served, number, *, at_launch=False):
    """Loses a rank in the step of this number."""
    honest = served.device.launch

    def launch(bucket, inputs):
        if served.device.runs + 1 < number:
            return honest(bucket, inputs)
        if at_launch:
            raise RankError("rank 1 died")
        return Lost()

    served.device.launch = launch
    return served


@pytest.mark.parametrize("at_launch", [False, True])
def test_a_lost_rank_ends_every_request_and_the_engine_and_is_not_raised_in_its_thread(at_launch):
    served = losing(toy.serving(groups=2), 3, at_launch=at_launch)
    sinks = [served.submit(ask(name)) for name in "ab"]
    served.engine.start()
    served.engine._thread.join(WAIT_S)
    assert not served.engine._thread.is_alive()
    assert [(sink.end.reason, sink.end.message) for sink in sinks] == [("error", "rank 1 died")] * 2
    assert served.engine.stats()["num_requests_running"] == 0
    assert served.engine.failure == "rank 1 died"
    with pytest.raises(RequestError, match="takes no new requests: rank 1 died"):
        served.engine.submit(ask("c"), toy.Collector())
    served.engine.stop()


def test_a_lost_rank_is_noticed_while_idle():
    served = toy.serving(groups=2, refresh_every_s=0.01)

    def refresh():
        raise RankError("rank 1 died")

    served.device.refresh = refresh
    served.engine.start()
    served.engine._thread.join(WAIT_S)
    assert not served.engine._thread.is_alive()


def test_a_lost_rank_is_raised_to_whoever_steps_by_hand():
    served = losing(toy.serving(groups=2), 1)
    served.submit(ask("a"))
    with pytest.raises(RankError, match="rank 1 died"):
        served.drain()


def test_a_defect_of_the_engine_ends_every_request_and_refuses_new_ones():
    served = toy.serving()
    a = served.submit(ask("a"))
    served.engine.step()
    pages = served.engine.stepper.cache_managers[0].pages
    pages.allocate(pages.free_count, "thief")
    b = served.submit(ask("b"))
    with pytest.raises(OwnershipError, match="'b' asks for"):
        served.engine.run_forever()
    assert (a.end.reason, b.end.reason) == ("error", "error")
    assert "OwnershipError" in a.end.message
    with pytest.raises(RequestError, match="takes no new requests: OwnershipError") as caught:
        served.engine.submit(ask("c"), toy.Collector())
    assert caught.value.code == "engine_stopped"


def test_who_releases_releases_no_other():
    served = toy.serving(refresh_every_s=None)
    served.engine.start()
    try:
        events = queue.Queue()
        for _ in range(2):
            served.engine.hold()
        served.submit(ask("a", max_tokens=1), events.put)
        served.engine.release()
        served.submit(ask("b", max_tokens=1), events.put)
        with pytest.raises(queue.Empty):
            events.get(timeout=0.2)
        served.engine.release()
        assert sorted(events.get(timeout=WAIT_S).request_id for _ in range(4)) == ["a", "a", "b", "b"]
    finally:
        served.engine.stop()


def test_requests_that_are_held_back_begin_together():
    served = toy.serving(refresh_every_s=None)
    served.engine.start()
    try:
        events, names = queue.Queue(), ["a", "b", "c"]
        served.engine.hold()
        for name in names:
            served.submit(ask(name, max_tokens=1), events.put)
        with pytest.raises(queue.Empty):
            events.get(timeout=0.2)
        assert served.device.runs == 0
        served.engine.release()
        ends = [event for event in (events.get(timeout=WAIT_S) for _ in range(6)) if isinstance(event, FinishEvent)]
        assert sorted(end.request_id for end in ends) == names
        # And what comes later wakes it as before.
        served.submit(ask("d", max_tokens=1), events.put)
        assert events.get(timeout=WAIT_S).request_id == "d"
    finally:
        served.engine.stop()


def test_stop_without_drain_cancels():
    served = toy.serving()
    served.device.on_run = lambda: served.engine.stop(drain=False)
    sinks = [served.submit(ask(f"r{i}", max_tokens=20)) for i in range(2)]
    served.engine.run_forever()
    assert [sink.end.reason for sink in sinks] == ["cancelled", "cancelled"]
    assert served.device.runs == 1
    assert served.device.log[-1] == ("result", 1)


def test_stop_from_inside_a_sink_does_not_wait_for_itself():
    served = toy.serving()
    ended = threading.Event()

    def sink(event):
        if isinstance(event, FinishEvent):
            ended.set()
        else:
            served.engine.stop()

    served.submit(ask(), sink)
    served.engine.start()
    assert ended.wait(WAIT_S)
    served.engine.stop()


def test_an_idle_engine_refreshes():
    refreshed = threading.Event()
    served = toy.serving(refresh_every_s=0.001)
    served.device.refresh = lambda: refreshed.set() or True
    served.engine.start()
    try:
        assert refreshed.wait(WAIT_S)
    finally:
        served.engine.stop()


def test_an_engine_is_started_once():
    served = toy.serving()
    served.engine.start()
    served.engine.stop()
    with pytest.raises(RuntimeError, match="started once"):
        served.engine.start()


def test_from_loader_makes_the_executor_on_the_thread_that_serves():
    threads = set()
    device = toy.serving().device
    device.on_run = lambda: threads.add(threading.current_thread())

    def load():
        threads.add(threading.current_thread())
        return device

    engine = Engine.from_loader(load)
    device.attach(engine)
    finished = threading.Event()
    tokens = []
    request = ask(max_tokens=4)
    engine.submit(request, lambda event: tokens.extend(event.token_ids) if isinstance(event, TokenEvent) else finished.set())
    assert finished.wait(60)
    engine.stop()
    assert tokens == toy.reference_run(request, device.limits.max_model_len).tokens
    assert len(threads) == 1
    assert threading.current_thread() not in threads
    assert not threads.pop().is_alive()


def test_from_loader_raises_what_loading_raises():
    def load():
        raise ArtifactError("no weights")

    with pytest.raises(ArtifactError, match="no weights"):
        Engine.from_loader(load)


def test_a_step_that_hangs_is_given_up_by_another_thread():
    served = toy.serving()
    entered, release, told = threading.Event(), threading.Event(), []
    launch = served.device.launch

    def hanging(bucket, inputs):
        if served.device.runs == 2:
            entered.set()
            release.wait(WAIT_S)
        return launch(bucket, inputs)

    served.device.launch = hanging
    served.engine._on_failure = lambda: told.append(served.engine.failure)
    ends, entries = [], []
    served.engine.on_end, served.engine.stepper.journal = ends.append, Journal(entries.append)
    running, waiting = served.submit(ask("running", max_tokens=20)), served.submit(ask("waiting", max_tokens=20))
    served.engine.start()
    assert entered.wait(WAIT_S)
    queued = served.submit(ask("queued"))
    assert served.engine.alive
    assert served.engine.step_age_s > 0
    served.engine.give_up("a step hangs")
    for sink in (running, waiting, queued):
        assert (sink.end.reason, sink.end.message) == ("error", "a step hangs")
    assert not served.engine.alive
    with pytest.raises(RequestError, match="takes no new requests: a step hangs") as refused:
        served.submit(ask("late"))
    assert refused.value.code == "engine_stopped"
    # Its thread may come back: nothing is sent twice, and it ends.
    release.set()
    served.engine._thread.join(WAIT_S)
    assert not served.engine._thread.is_alive()
    assert told == ["a step hangs"]
    assert sorted(end.request_id for end in ends) == ["queued", "running", "waiting"]
    # The step that hung has a result, which counts for nobody.
    assert entries[-1][0] == "result"
    stats = served.engine.stats()
    assert (stats["requests_total"], stats["requests_finished_error"]) == (3, 3)
    served.engine.give_up("again")
    assert served.engine.failure == "a step hangs"
