"""A decode server over sockets and the real transfer engine: what it answers, and what happens when a prefill server does not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from support import toy_device
from support.fleet import Answer, Fleet, until

from npucompile.graphs.errors import RequestError
from npucompile.graphs.steps.kind import SegmentSizes
from npucompile.graphs.types import Bucket
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.kv_transfer.room import RoomStage
from npucompile.runtime.request import ExecutionRecord, FinishEvent, Logprobs, Request, Sampling
from tests.support import optional

PROMPT = tuple(3 + (7 * place) % 50 for place in range(40))
SAMPLED = Sampling(temperature=0.9, top_p=0.95, seed=7, presence_penalty=0.5, repetition_penalty=1.2)


@pytest.fixture(scope="module", autouse=True)
def needed() -> None:
    optional.transfer_engine()


@pytest.fixture(scope="module")
def fleet(tiny_artifact: Path) -> Iterator[Fleet]:
    """Two prefill servers, and a decode server that has prefill buckets, so that it can be asked for what it would answer alone."""
    fleet = Fleet(tiny_artifact, 2, mixed=True)
    fleet.connected()
    yield fleet
    fleet.close()


def alone(fleet: Fleet, request: Request) -> Answer:
    answer = Answer()
    fleet.engine.submit(replace(request, id=f"{request.id} alone", skip_reading_prefix_cache=True), answer)
    return answer.wait()


def compare(values: Sequence[Logprobs], expected: Sequence[Logprobs]) -> None:
    assert [[token for token, _ in value.top] for value in values] == [[token for token, _ in value.top] for value in expected]
    assert [value.logprob for value in values] == pytest.approx([value.logprob for value in expected], abs=1e-4)


@pytest.mark.parametrize(("length", "sampling"), [(40, Sampling()), *((length, SAMPLED) for length in (40, 1, 2, 3, 16, 17, 33))])
def test_the_answer_is_that_of_one_server(fleet: Fleet, length: int, sampling: Sampling) -> None:
    # A salt of its own, so that every prompt is computed.
    request = Request(f"{length} {sampling.temperature}", PROMPT[:length], 12, sampling, logprobs=2, cache_salt=f"{length}{sampling}")
    before = fleet.decode.stats()["kv_transfer_requests_total"]
    answer = fleet.ask(request).wait()
    assert fleet.decode.stats()["kv_transfer_requests_total"] == before + (length > 1)
    expected = alone(fleet, request)
    assert answer.end is not None
    assert expected.end is not None
    # The last token of the prompt is computed by a decode step and not by a prefill step, which rounds in another way.
    assert answer.tokens == expected.tokens
    compare(answer.logprobs, expected.logprobs)
    assert answer.end.reason == expected.end.reason == "length"
    assert answer.end.record.queue_ms <= answer.end.record.first_token_ms
    fleet.check()


def test_prompts_are_scored(fleet: Fleet) -> None:
    request = Request("scored", PROMPT, 4, prompt_logprobs=2, prompt_logprobs_from=20, logprobs=2)
    answer = fleet.ask(request).wait()
    expected = alone(fleet, request)
    assert answer.tokens == expected.tokens
    assert len(answer.scored) == 20
    compare(answer.scored, expected.scored)


def test_many_at_once_end_right(fleet: Fleet) -> None:
    requests = [Request(f"many {n}", PROMPT[n % 7 : 2 + n], 8, Sampling(temperature=0.8, seed=n)) for n in range(6, 36)]
    before = fleet.decode.stats()["kv_transfer_requests_total"]
    answers = [fleet.ask(request) for request in requests]
    for request, answer in zip(requests, answers, strict=True):
        assert answer.wait().tokens == alone(fleet, request).tokens
    assert fleet.decode.stats()["kv_transfer_requests_total"] == before + len(requests)
    written = [prefill.hub.stats() for prefill in fleet.prefills]
    assert sum(stats["kv_transfer_requests_total"] for stats in written) >= len(requests)
    # Of 90 pages and more at least one a request was not known before; each has a state beside it.
    instance = fleet.instance
    least = len(requests) * (instance.item_bytes("pages") + instance.item_bytes("slots"))
    assert sum(stats["kv_transfer_bytes_total"] for stats in written) >= least
    fleet.check()


def test_clients_that_leave_leave_nothing_behind(fleet: Fleet) -> None:
    answers = [fleet.ask(Request(f"leaves {n}", (60 + n, *PROMPT), 14)) for n in range(20)]
    for n in range(0, 20, 2):
        fleet.decode.cancel(f"leaves {n}")
    reasons = [answer.wait().end.reason for answer in answers]  # type: ignore[union-attr]
    assert set(reasons[1::2]) == {"length"}
    assert set(reasons[::2]) <= {"cancelled", "length"}
    fleet.check()


def test_a_deadline_holds_for_a_prompt_that_is_being_computed(fleet: Fleet) -> None:
    assert fleet.ask(Request("late", (61, *PROMPT), 14, timeout_ms=0.01)).wait().end.reason == "timeout"  # type: ignore[union-attr]
    fleet.check()


def test_another_prefill_server_computes_what_one_has_lost(tiny_artifact: Path) -> None:
    fleet = Fleet(tiny_artifact, 2)
    fleet.connected()
    answers = [fleet.ask(Request(f"{n}", (60 + n, *PROMPT), 10)) for n in range(12)]
    fleet.prefills[0].stop()
    more = [fleet.ask(Request(f"more {n}", (60 + n, *PROMPT), 10)) for n in range(12)]
    ends = [answer.wait().end for answer in (*answers, *more)]
    assert {end.reason for end in ends if end} == {"length"}
    for first, second in zip(answers, more, strict=True):
        assert first.tokens == second.tokens
    fleet.prefills[0].start()
    fleet.connected()
    fleet.check()
    fleet.close()


def test_without_a_prefill_server_requests_are_refused_or_computed_here(tiny_artifact: Path) -> None:
    fleet = Fleet(tiny_artifact)
    fleet.connected()
    running = [fleet.ask(Request(f"{n}", (60 + n, *PROMPT), 10)) for n in range(8)]
    fleet.prefills[0].stop()
    for answer in running:
        end = answer.wait().end
        assert end is not None
        assert end.reason in ("length", "error")
        assert end.reason == "length" or (end.code == "not_handed_over" and "disconnected" in (end.message or ""))
    fleet.connected(0)
    with pytest.raises(RequestError, match="no prefill server is connected: http"):
        fleet.ask(Request("refused", PROMPT, 4))
    fleet.check()
    fleet.close()


@pytest.mark.parametrize("length", [40, 2, 1])
def test_a_request_that_generates_nothing_ends(fleet: Fleet, length: int) -> None:
    """No step was left to end it, and it kept its place."""
    end = fleet.ask(Request(f"nothing {length}", PROMPT[:length], 0)).wait().end
    assert end is not None
    assert (end.reason, end.completion_tokens) == ("length", 0)
    fleet.check()


def test_a_prefill_server_is_found_by_what_routers_call_it(fleet: Fleet) -> None:
    """Which is its host and SGLang's bootstrap port, where a line has that."""
    first, second = fleet.decode.links
    engine_id = fleet.prefills[1].hub._hello.engine_id
    assert [fleet.decode._at(place) for place in (first.url.removeprefix("http://"), engine_id)] == [first, second]
    # Two are at this host.
    assert fleet.decode._at("127.0.0.1:8998") is None
    with mock.patch.object(fleet.decode, "links", (first,)):
        assert fleet.decode._at("127.0.0.1:8998") is first
        assert [fleet.decode._at(place) for place in ("127.0.0.2:8998", "", ":", "x")] == [None] * 4


def small(artifact: Artifact) -> CpuExecutor:
    """Fewer pages than requests take."""
    executor = CpuExecutor(artifact)
    executor.limits = replace(executor.limits, num_pages=11)
    return executor


def crowd(fleet: Fleet) -> tuple[list[Request], list[Answer]]:
    """Twelve requests of which three have pages."""
    requests = [Request(f"{n}", PROMPT[n : n + 17], 40, skip_reading_prefix_cache=True) for n in range(12)]
    return requests, [fleet.ask(request) for request in requests]


def test_the_end_of_an_attempt_that_is_given_up_is_nobodys(tiny_artifact: Path) -> None:
    """Of requests that wait for pages when their prefill server is lost: they were answered with nothing, as by the client's own wish."""
    fleet = Fleet(tiny_artifact, mixed=True, load=small)
    fleet.connected()
    requests, answers = crowd(fleet)
    (receiver,) = fleet.decode._receivers
    until(lambda: sum(handover.room.stage is RoomStage.WAITING for handover in list(receiver._handovers.values())) > 2)
    fleet.prefills[0].stop()
    for request, answer in zip(requests, answers, strict=True):
        assert answer.wait().end.reason == "length"  # type: ignore[union-attr]
        assert answer.tokens == alone(fleet, request).tokens
    fleet.check()
    fleet.close()


def test_prompts_that_wait_for_pages_do_not_keep_requests_that_had_landed_from_going_on(tiny_artifact: Path) -> None:
    """Each server waited for what the other one held: a place where prompts are computed, and pages."""
    fleet = Fleet(tiny_artifact, load=small)
    fleet.connected()
    _, answers = crowd(fleet)
    ends = [answer.wait().end for answer in answers]
    assert {end.reason for end in ends if end} == {"length"}
    assert sum(end.record.preemptions for end in ends if end)
    fleet.check()
    fleet.close()


def test_how_the_engine_ends_what_waits_for_pages_is_told(tiny_artifact: Path) -> None:
    """A deadline that is over there, or a failure, is not the client's own wish."""
    fleet = Fleet(tiny_artifact, load=small)
    fleet.connected()
    _, answers = crowd(fleet)
    (receiver,) = fleet.decode._receivers

    def waiting() -> list[str]:
        rooms = list(receiver._handovers.values())
        return [handover.request_id for handover in rooms if handover.room.stage is RoomStage.WAITING]

    until(lambda: len(waiting()) > 2)
    # The last one waits longest.
    name = waiting()[-1]
    event = FinishEvent(name, "error", 17, 0, ExecutionRecord(), "the device is lost", code="engine_failed")
    fleet.decode._call(lambda: fleet.decode._late(event))
    end = answers[int(name)].wait().end
    assert end is not None
    assert (end.reason, end.message, end.code) == ("error", "the device is lost", "engine_failed")
    for answer in answers:
        assert answer.wait().end.reason == ("error" if answer is answers[int(name)] else "length")  # type: ignore[union-attr]
    fleet.check()
    fleet.close()


@pytest.mark.parametrize("local", [True, False])
def test_a_request_that_nobody_hands_over_again_is_computed_here_or_ends(tiny_artifact: Path, local: bool) -> None:
    fleet = Fleet(tiny_artifact, mixed=local, load=small)
    fleet.connected()
    chosen = fleet.decode._chosen
    # For requests that lose their pages there is none.
    with mock.patch.object(fleet.decode, "_chosen", lambda request, tried: None if tried == () else chosen(request, tried)):
        requests = [Request(f"{n}", PROMPT[n : n + 17], 40, skip_reading_prefix_cache=True) for n in range(6)]
        answers = [fleet.ask(request) for request in requests]
        ends = [answer.wait().end for answer in answers]
    computed = fleet.decode.stats()["kv_transfer_local_total"]
    lost = [end for end in ends if end and end.reason == "error"]
    assert computed > 0 if local else computed == 0
    assert bool(lost) is not local
    assert all(end.code == "not_handed_over" and "lost its pages to others" in (end.message or "") for end in lost)
    for request, answer in zip(requests, answers, strict=True):
        if local:
            assert answer.tokens == alone(fleet, request).tokens
    fleet.check()
    fleet.close()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model": "another"}, "model: another and "),
        ({"page_size": 32}, "page size: 32 and 16"),
    ],
)
def test_servers_that_differ_are_no_pair(tiny_artifact: Path, change: dict[str, object], text: str) -> None:
    fleet = Fleet(tiny_artifact, change=lambda instance: replace(instance, **change))
    until(lambda: text in fleet.decode.links[0].state)
    with pytest.raises(RequestError, match=text):
        fleet.ask(Request("refused", PROMPT, 4))
    fleet.close()


def test_a_prefill_server_with_keys_is_shown_one(tiny_artifact: Path) -> None:
    fleet = Fleet(tiny_artifact, keys=["secret"])
    until(lambda: "status 401" in fleet.decode.links[0].state)
    fleet.close()
    fleet = Fleet(tiny_artifact, keys=["secret"], headers={"Authorization": "Bearer secret"})
    fleet.connected()
    fleet.close()


def test_pictures_do_not_travel(fleet: Fleet) -> None:
    """These graphs take none; what is said of a pair says where they are computed."""
    request = Request("picture", PROMPT, 2, pictures=(toy_device.picture(3, 2, 2, 1),))
    with pytest.raises(RequestError, match="1 pictures, and these graphs take none"):
        fleet.decode.submit(request, Answer())
    executor = fleet.engine.executor
    takes = mock.patch.multiple(executor, segments=SegmentSizes(2 * toy_device.PATCH, 4), limits=replace(executor.limits, picture_rows=9))
    # Without prefill buckets of its own it would have to ask for the prompt.
    buckets = mock.patch.object(type(executor), "buckets", (*executor.buckets, Bucket("encode", 1, 64)))
    with takes, buckets, mock.patch.object(fleet.decode._landed, "local", new=False):
        with pytest.raises(RequestError, match="prompts that are handed over are text") as refused:
            fleet.decode.submit(request, Answer())
        assert (refused.value.param, refused.value.code) == ("pictures", "no_bucket")
