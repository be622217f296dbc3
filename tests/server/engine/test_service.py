"""server/engine/service.py: messages become engine requests, and events get from the engine thread to the event loop."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace

import pytest
from support.scripted import ManualEngine
from support.texts import byte_codec

from npucompile.graphs.errors import RequestError
from npucompile.runtime.request import Request, Sampling, TokenEvent
from npucompile.server.engine.generation import completion_seed
from npucompile.server.engine.service import ServedModel, Service
from npucompile.server.requests.bounds import MAX_SEED
from npucompile.server.requests.create_body import read_create
from npucompile.server.response.prepare import prepare as prepare_response
from npucompile.server.response.progress import Response

SAMPLED = {"temperature": 0.5, "top_p": 0.9, "seed": 3}
MODEL = ServedModel("tiny", max_model_len=16, vocab_size=300, eos_token_ids=frozenset({299}))


def service(engine=None, **options):
    return Service(engine or ManualEngine(), byte_codec(), MODEL, clock=lambda: 1700000000.9, **options)


def prepare(**fields):
    return prepare_response(service(), read_create(fields), "resp_1", "s")


@pytest.mark.parametrize(("logprobs", "top_logprobs"), [(None, 0), (0, 0), (20, 20)])
def test_what_is_not_asked_for_stays_unasked(logprobs, top_logprobs):
    prepared = prepare(input="abc", top_logprobs=logprobs)
    assert prepared.info.top_logprobs == top_logprobs
    assert (prepared.requests[0].logprobs, prepared.requests[0].speculative_tokens) == (logprobs, None)


def test_completions_are_requests_that_differ_in_id_and_seed():
    sampling = Sampling(**SAMPLED)
    single = prepare(input="abc", **SAMPLED, top_logprobs=1)
    prepared = prepare(input="abc", **SAMPLED, top_logprobs=1, n=3)
    assert (prepared.info, prepared.stop) == (single.info, single.stop)
    first, *others = prepared.requests
    assert (first,) == single.requests
    for index, request in enumerate(others, start=1):
        assert request == replace(first, id=f"resp_1_{index}", sampling=replace(sampling, seed=completion_seed(3, index)))


def test_without_a_seed_the_engine_draws_one_for_each():
    prepared = prepare(input="abc", temperature=1.0, n=8)
    assert [request.sampling.seed for request in prepared.requests] == [None] * 8
    assert len({request.id for request in prepared.requests}) == 8


def test_seeds_of_completions_can_be_computed_separately_and_do_not_meet():
    assert completion_seed(3, 0) == 3
    assert completion_seed(3, 2) == int(hashlib.sha256(b"3/2").hexdigest()[:16], 16) // 2
    assert completion_seed(3, 1) == 92655289252268599
    seeds = [completion_seed(seed, index) for seed in [*range(50), MAX_SEED] for index in range(8)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed <= MAX_SEED for seed in seeds)


def test_token_ids_are_taken_as_they_are_and_eos_may_be_ignored():
    request = prepare(input_token_ids=[5, 0, 299], model="tiny", ignore_eos=True).requests[0]
    assert (request.prompt, request.stop_token_ids) == ((5, 0, 299), frozenset())


def test_the_default_length_is_what_the_context_holds():
    assert prepare(input_token_ids=[1] * 10).requests[0].max_tokens == 6
    assert prepare(input_token_ids=[1] * 10, max_output_tokens=6).requests[0].max_tokens == 6
    assert prepare(input_token_ids=[1] * 15).info.max_output_tokens == 1


@pytest.mark.parametrize(
    ("fields", "code", "param", "names"),
    [
        ({"input": "a", "model": "huge"}, "model_not_found", "model", ["'huge'", "'tiny'"]),
        ({"input": ""}, "empty_prompt", "input", ["at least 1"]),
        ({"input_token_ids": []}, "empty_prompt", "input_token_ids", ["at least 1"]),
        ({"input_token_ids": [1, 300]}, "token_out_of_range", "input_token_ids", ["300", "0 to 299"]),
        ({"input_token_ids": [-1]}, "token_out_of_range", "input_token_ids", ["-1", "0 to 299"]),
        ({"input": "a" * 16}, "context_length_exceeded", "input", ["16 tokens", "'tiny'"]),
        ({"input": "a" * 17}, "context_length_exceeded", "input", ["17 tokens", "is 16 tokens"]),
        ({"input": "a" * 10, "max_output_tokens": 7}, "context_length_exceeded", "max_output_tokens", ["10", "7", "16"]),
        ({"input": [{"role": "user", "content": "a"}]}, "chat_template_missing", "input", ["1 messages", "--chat-template"]),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(fields, code, param, names):
    with pytest.raises(RequestError) as caught:
        prepare(**fields)
    assert (caught.value.code, caught.value.param) == (code, param)
    for name in names:
        assert name in str(caught.value)


def test_the_rest_is_passed_on():
    engine = ManualEngine()
    engine.stats = lambda: {"num_requests_running": 1}
    facade = service(engine, readiness=lambda: {"status": "starting"})
    facade.cancel("resp_1")
    assert engine.cancelled == ["resp_1"]
    assert facade.stats() == {"num_requests_running": 1, "request_parts_left_out_total": 0}
    assert facade.readiness() == {"status": "starting"}
    assert service().readiness() == {"status": "ok"}
    assert Response(prepare(input="abc"), facade.tokenizer).begin()[0]["type"] == "response.created"


REQUESTS = tuple(Request(name, (1,), 1) for name in "abc")


class Refusing(ManualEngine):
    """Accepts `capacity` requests and emits a token of each at once; refuses the next."""

    def __init__(self, capacity, error):
        super().__init__()
        self.capacity = capacity
        self.error = error

    def submit(self, request, sink):
        if not self.capacity:
            raise self.error
        self.capacity -= 1
        super().submit(request, sink)
        sink(TokenEvent(request.id, (1,)))

    def cancel(self, *request_ids):
        super().cancel(*request_ids)
        for request_id in request_ids:
            self.finish(request_id, "cancelled", 1)


@pytest.mark.parametrize("capacity", [0, 1, 2])
def test_one_request_refused_is_all_refused(capacity):
    delivered = []
    engine = Refusing(capacity, RequestError("full", code="overloaded"))

    async def run():
        with pytest.raises(RequestError, match="full"):
            service(engine).submit(REQUESTS, delivered.append)
        # Let the loop deliver what the engine emitted for the requests it had accepted.
        for _ in range(5):
            await asyncio.sleep(0)

    asyncio.run(run())
    assert engine.cancelled == ["a", "b"][:capacity]
    assert delivered == []


@pytest.mark.parametrize(
    ("param", "field"),
    [("logprobs", "top_logprobs"), ("speculative_tokens", "speculative_tokens"), (None, None)],
)
def test_the_engines_refusals_name_the_field_as_clients_know_it(param, field):
    async def run():
        service(Refusing(0, RequestError("5 is more than the 2 that were built", param=param))).submit(REQUESTS, lambda event: None)

    with pytest.raises(RequestError, match="the 2 that were built") as caught:
        asyncio.run(run())
    assert caught.value.param == field


def test_clients_are_tenants_of_the_engine_that_nobody_can_name():
    engine = ManualEngine()

    async def run():
        served = service(engine)
        for request, client in zip(REQUESTS, ["1.2.3.4", "1.2.3.4", "5.6.7.8"], strict=True):
            served.submit([request], lambda _: None, client)
        served.submit([replace(REQUESTS[0], id="d")], lambda _: None)

    asyncio.run(run())
    first, second, third, nobody = (request.tenant for request in engine.requests.values())
    assert first == second != third
    assert nobody == ""
    assert "1.2.3.4" not in first


def test_requests_of_one_turn_of_the_loop_begin_together():
    class Holding(ManualEngine):
        def __init__(self):
            super().__init__()
            self.log = []

        def submit(self, request, sink):
            self.log.append(request.id)

        def hold(self):
            self.log.append("hold")

        def release(self):
            self.log.append("release")

    async def play():
        engine = Holding()
        served = service(engine)
        for turn in (("a", "b"), ("c",)):
            for name in turn:
                served.submit((Request(name, (1,), 1),), lambda _: None)
            await asyncio.sleep(0)
        return engine.log

    assert asyncio.run(play()) == ["hold", "a", "b", "release", "hold", "c", "release"]
