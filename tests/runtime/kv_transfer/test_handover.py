"""A prompt that one engine computed and another one goes on with: tokens and log probabilities are those of one engine alone."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.runtime.cpu_executor import CpuExecutor
from npucompile.runtime.engine import Engine
from npucompile.runtime.kv_transfer.segments import segments
from npucompile.runtime.request import RECEIVE, SEND, FinishEvent, ParkedEvent, Request, Sampling, TokenEvent
from npucompile.runtime.scheduler.kv_cache_manager import PrefixCacheSettings

PROMPT = tuple(3 + (7 * place) % 50 for place in range(40))


class Server:
    """An engine that is stepped by hand, what its requests got, and where its pools are."""

    def __init__(self, artifact: Path, **settings: Any) -> None:
        self.executor = CpuExecutor(Artifact.open(artifact))
        self.engine = Engine(self.executor, **{"refresh_every_s": None, "prefix_cache": PrefixCacheSettings(), **settings})
        self.events: dict[str, list[TokenEvent | FinishEvent]] = {}
        self.parked: dict[str, ParkedEvent] = {}
        self.engine.stepper.on_parked = lambda event: self.parked.update({event.request_id: event})

    def submit(self, request: Request) -> None:
        self.engine.submit(request, self.events.setdefault(request.id, []).append)

    def run(self) -> None:
        while self.engine.step():
            pass

    def end(self, request_id: str) -> tuple[list[int], list[float], FinishEvent]:
        *tokens, end = self.events.pop(request_id)
        assert isinstance(end, FinishEvent)
        logprobs = [entry.logprob for event in tokens for entry in event.logprobs]
        return [token for event in tokens for token in event.token_ids], logprobs, end


def hand_over(sender: Server, receiver: Server, request: Request) -> None:
    """Everything that a transfer does, over memory of one process."""
    sender.submit(Request(request.id, request.prompt, 1, cache_salt=request.cache_salt, handover=SEND))
    receiver.submit(replace(request, handover=RECEIVE))
    sender.run()
    receiver.run()
    source, target = sender.parked.pop(request.id), receiver.parked.pop(request.id)
    assert len(source.pages) == len(target.pages)
    pages = list(zip(source.pages, target.pages, strict=True))[target.known :]
    for segment in segments(sender.executor.regions, receiver.executor.regions, {"pages": pages, "slots": [(source.slot, target.slot)]}):
        ctypes.memmove(segment.target, segment.source, segment.nbytes)
    sender.engine.cancel(request.id)
    sender.run()
    assert sender.end(request.id)[2].reason == "cancelled"
    receiver.engine.landed(request.id)
    receiver.run()


@pytest.fixture(scope="module")
def servers(tiny_artifact: Path) -> tuple[Server, Server, Server]:
    return Server(tiny_artifact), Server(tiny_artifact), Server(tiny_artifact)


SAMPLED = Sampling(temperature=0.8, seed=3, presence_penalty=0.5, min_tokens=4)


@pytest.mark.parametrize("length", [2, 3, 15, 16, 17, 18, 31, 33, 34, 40])
def test_the_answer_is_that_of_one_server(servers, length):
    alone, sender, receiver = servers
    request = Request(
        f"{length}", PROMPT[:length], 9, SAMPLED if length < 40 else Sampling(seed=1), logprobs=2, skip_reading_prefix_cache=True
    )
    alone.submit(request)
    alone.run()
    hand_over(sender, receiver, request)
    tokens, logprobs, end = receiver.end(request.id)
    expected, expected_logprobs, expected_end = alone.end(request.id)
    assert (tokens, end.reason) == (expected, expected_end.reason)
    assert logprobs == pytest.approx(expected_logprobs, abs=2e-5)
    for server in servers:
        server.engine.stepper.check()
        assert not server.parked


def test_servers_that_keep_no_prefixes_hand_over_too(tiny_artifact):
    """As the published pairs do, which turn the cache of prefixes off on both sides."""
    alone, sender, receiver = (Server(tiny_artifact, prefix_cache=None) for _ in range(3))
    for length in (2, 16, 17, 40):
        request = Request(f"{length}", PROMPT[:length], 9, SAMPLED)
        alone.submit(request)
        alone.run()
        hand_over(sender, receiver, request)
        assert receiver.end(request.id)[0] == alone.end(request.id)[0]
        for server in (alone, sender, receiver):
            server.engine.stepper.check()


@pytest.mark.parametrize("first", [16, 33, 40])
def test_prefixes_are_known_on_either_side(servers, first):
    alone, sender, receiver = servers
    requests = [Request(f"{length}", PROMPT[:length], 9, Sampling(seed=1), cache_salt=f"{first}") for length in (first, 40)]
    for request in requests:
        hand_over(sender, receiver, request)
        alone.submit(replace(request, skip_reading_prefix_cache=True))
        alone.run()
        assert receiver.end(request.id)[0] == alone.end(request.id)[0]
        for server in servers:
            server.engine.stepper.check()


def test_a_parked_request_keeps_its_pages_while_others_run_and_are_preempted(servers):
    *_, receiver = servers
    request = Request("parked", PROMPT, 9, Sampling(seed=1), handover=RECEIVE, skip_reading_prefix_cache=True)
    receiver.submit(request)
    receiver.run()
    pages = receiver.parked.pop("parked").pages
    for number in range(4):
        receiver.submit(Request(f"{number}", PROMPT[number:], 30, Sampling(seed=1)))
    receiver.run()
    assert set(pages) <= set(receiver.engine.stepper.cache_managers[0].pages.owned("parked"))
    receiver.engine.stepper.check()
    receiver.engine.cancel("parked")
    receiver.run()
    assert receiver.end("parked")[2].reason == "cancelled"
    receiver.engine.stepper.check()
