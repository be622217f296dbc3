"""server/openai/api.py: sampling that a request does not set, and limits of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.scripted import MODEL

from npucompile.graphs.errors import RequestError
from npucompile.runtime.request import Sampling
from npucompile.server.openai.api import fingerprint, includes_usage, new_id, options_of, sampling_of
from npucompile.server.openai.request_models import CompletionRequest
from npucompile.server.service import Service


def service(**defaults):
    return Service(None, None, replace(MODEL, defaults=defaults))


def body(**fields):
    return CompletionRequest(prompt="a", **fields)


@pytest.mark.parametrize(
    ("defaults", "fields", "expected"),
    [
        ({}, {}, Sampling(1.0, 0, 1.0)),
        ({"temperature": 0.6, "top_k": 20}, {}, Sampling(0.6, 20, 1.0)),
        ({"temperature": 0.6, "top_k": 20}, {"temperature": 0.0, "top_k": -1, "min_p": 0.5}, Sampling(0.0, 0, 1.0, 0.5)),
    ],
)
def test_the_request_comes_before_the_checkpoint_and_that_before_openai(defaults, fields, expected):
    assert sampling_of(body(**fields), service(**defaults)) == expected


def test_one_stop_string_or_several():
    assert options_of(body(stop="a"), service(), 3, None, "max_tokens").stop == ("a",)
    assert options_of(body(stop=["a", "b"]), service(), 3, None, "max_tokens").stop == ("a", "b")


def test_usage_is_of_streams():
    assert not includes_usage(body(stream=True))
    assert includes_usage(body(stream=True, stream_options={"include_usage": True}))
    with pytest.raises(RequestError, match="stream: true"):
        includes_usage(body(stream_options={"include_usage": False}))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"min_tokens": 2}, "masked"),
        ({"min_tokens": 2, "ignore_eos": True, "stop": "a"}, "masked"),
        ({"min_tokens": 2, "ignore_eos": True, "stop_token_ids": [1]}, "masked"),
        ({"min_tokens": 4, "ignore_eos": True}, "min_tokens is 4 and max_tokens is 3"),
    ],
)
def test_tokens_that_must_come_need_that_nothing_ends_the_output(fields, words):
    with pytest.raises(RequestError, match=words) as caught:
        options_of(body(**fields), service(), 3, None, "max_tokens")
    assert caught.value.param == "min_tokens"


def test_where_nothing_ends_the_output_enough_tokens_come():
    """As benchmarks ask for outputs of one length."""
    assert options_of(body(min_tokens=3, ignore_eos=True), service(), 3, None, "max_tokens").max_tokens == 3


def test_names():
    assert fingerprint(service()) == f"fp_{MODEL.artifact[:16]}"
    assert fingerprint(Service(None, None, replace(MODEL, artifact=None))) is None
    assert new_id("cmpl-") != new_id("cmpl-")
