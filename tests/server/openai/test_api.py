"""server/openai/api.py: sampling that a request does not set, and limits of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.scripted import MODEL

from npucompile.graphs.errors import RequestError
from npucompile.runtime.request import Sampling
from npucompile.server.engine.service import Service
from npucompile.server.openai.api import defaults as checkpoint_defaults
from npucompile.server.openai.api import fingerprint, new_id, options_of, usage_wanted
from npucompile.server.openai.choices import UsageWanted
from npucompile.server.openai.request_models import CompletionRequest


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
        ({"repetition_penalty": 1.05}, {}, Sampling(1.0, repetition_penalty=1.05)),
        (
            {"repetition_penalty": 1.05, "presence_penalty": 1.5},
            {"repetition_penalty": 1.0, "frequency_penalty": 0.5},
            Sampling(1.0, presence_penalty=1.5, frequency_penalty=0.5),
        ),
    ],
)
def test_the_request_comes_before_the_checkpoint_and_that_before_openai(defaults, fields, expected):
    assert body(**fields).sampling(checkpoint_defaults(service(**defaults))) == expected


def test_one_stop_string_or_several():
    assert options_of(body(stop="a"), service(), 3, None, "max_tokens").stop == ("a",)
    assert options_of(body(stop=["a", "b"]), service(), 3, None, "max_tokens").stop == ("a", "b")


def test_usage_is_of_streams():
    assert usage_wanted(body(stream=True)) is UsageWanted.NOWHERE
    both = {"include_usage": True, "continuous_usage_stats": True}
    for options, expected in ((both, UsageWanted.EACH), (both | {"include_usage": False}, UsageWanted.NOWHERE)):
        assert usage_wanted(body(stream=True, stream_options=options)) is expected
    assert usage_wanted(body(stream=True, stream_options={"include_usage": True})) is UsageWanted.LAST
    with pytest.raises(RequestError, match="stream: true"):
        usage_wanted(body(stream_options={"include_usage": False}))


def test_restrictions_are_part_of_the_sampling():
    options = options_of(body(min_tokens=3, allowed_token_ids=[5, 2, 5], bad_words=["a", " b"]), service(), 3, None, "max_tokens")
    assert options.sampling == Sampling(1.0, min_tokens=3, allowed_token_ids=(2, 5))
    assert options.bad_words == ("a", " b")


def test_names():
    assert fingerprint(service()) == f"fp_{MODEL.artifact[:16]}"
    assert fingerprint(Service(None, None, replace(MODEL, artifact=None))) is None
    assert new_id("cmpl-") != new_id("cmpl-")
