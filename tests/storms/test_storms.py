"""Small storms against a real server: `run.py` in this folder makes large ones, whose figures are in docs/lab/server.md."""

from __future__ import annotations

import asyncio
import random

import pytest
from storms import run
from storms.chaos import BEHAVIOURS, chaos
from storms.fuzz import fuzz
from storms.jobs import jobs
from storms.soak import soak
from storms.turns import converse
from support import tiny

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    out = tmp_path_factory.mktemp("storms") / "tiny"
    tiny.built(tiny.planned("qwen3.5-tiny", buckets=(4, 8), prefill=(32,), max_model_len=128, max_logprobs=0), out)
    with run.served(out) as target:
        yield target


@pytest.fixture(scope="module")
def known(target):
    return asyncio.run(jobs(target, 8, 512, 24, random.Random(1)))


def test_every_token_of_many_streams_is_right(target, known):
    found = asyncio.run(soak(target, known, 24, 72, random.Random(2)))
    assert (found.requests, found.wrong) == (72, [])
    assert len(found.first_ms) == 72
    assert not any(asyncio.run(target.idle()).values())


def test_clients_that_break_off_leave_nothing_behind(target, known):
    ran = asyncio.run(chaos(target, known, 90, random.Random(3), rare=0.0))
    assert len(ran) == len(BEHAVIOURS)
    assert not any(asyncio.run(target.idle()).values())


def test_a_turn_of_a_conversation_computes_its_message_alone(target):
    found = asyncio.run(converse(target, 3, 3, random.Random(5), message=9, answer=12))
    assert found.wrong == []
    # Of a later turn all but the message, and the last token of the answer before it.
    assert [cached for cached, _ in found.found.values()] == [0, 3 * 20, 3 * 41]
    assert not any(asyncio.run(target.idle()).values())


def test_wrong_input_is_nobodys_fault_but_the_clients(target, known):
    found, calm = asyncio.run(fuzz(target, known[0], 300, 200, seed=4))
    assert found.faults == []
    assert calm.wrong == []
    assert len(calm.pauses_ms) > 1
    assert {"body 200", "body 400", "frame error invalid_json", "frame response.created"} <= set(found.answers)
    assert sum(count for answer, count in found.answers.items() if answer.startswith("body")) == 200
    assert not any(asyncio.run(target.idle()).values())
