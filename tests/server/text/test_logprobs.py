"""server/text/logprobs.py: log probabilities in OpenAI's shape, with and without bytes."""

from __future__ import annotations

import json
import math

import pytest

from npucompile.runtime.request import Logprobs
from npucompile.server.requests.frames import JSON, decode, encode
from npucompile.server.text.logprobs import token_objects, without_bytes
from npucompile.server.text.token_text import TokenText


def token_text(token_id):
    return TokenText(chr(token_id), chr(token_id).encode())


LOGPROBS = (Logprobs(-0.5, ((97, -0.25), (98, -0.5))), Logprobs(-3.0, ((98, -0.125), (252, -1.0))))


def test_one_object_per_token_with_the_likely_ones_in_their_order():
    assert token_objects(token_text, (98, 99), LOGPROBS) == [
        {
            "token": "b",
            "token_id": 98,
            "bytes": [98],
            "logprob": -0.5,
            "top_logprobs": [
                {"token": "a", "token_id": 97, "bytes": [97], "logprob": -0.25},
                {"token": "b", "token_id": 98, "bytes": [98], "logprob": -0.5},
            ],
        },
        {
            "token": "c",
            "token_id": 99,
            "bytes": [99],
            "logprob": -3.0,
            "top_logprobs": [
                {"token": "b", "token_id": 98, "bytes": [98], "logprob": -0.125},
                {"token": "ü", "token_id": 252, "bytes": [0xC3, 0xBC], "logprob": -1.0},
            ],
        },
    ]


def test_none_of_the_likely_ones_may_be_wanted():
    (entry,) = token_objects(token_text, (98,), (Logprobs(-0.5, ()),))
    assert entry["top_logprobs"] == []
    assert token_objects(token_text, (), ()) == []


def test_in_events_there_are_no_bytes_and_all_else_is_the_same():
    objects = token_objects(token_text, (98, 99), LOGPROBS)
    snapshot = json.loads(json.dumps(objects))
    events = without_bytes(objects)
    assert "bytes" not in json.dumps(events)
    assert objects == snapshot
    for full, bare in zip(objects, events, strict=True):
        assert {**full, "top_logprobs": 0} == {**bare, "bytes": full["bytes"], "top_logprobs": 0}
        assert [
            likely | {"bytes": whole["bytes"]} for likely, whole in zip(bare["top_logprobs"], full["top_logprobs"], strict=True)
        ] == full["top_logprobs"]


def test_minus_infinity_is_openais_least_log_probability_and_can_be_encoded():
    (entry,) = token_objects(token_text, (97,), (Logprobs(-math.inf, ((98, 0.0), (97, -math.inf))),))
    assert (entry["logprob"], [likely["logprob"] for likely in entry["top_logprobs"]]) == (-9999.0, [0.0, -9999.0])
    assert decode(encode(entry, JSON), JSON, 2**20) == entry


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_tokens_is_an_error_and_not_a_shift(count):
    with pytest.raises(ValueError, match="zip"):
        token_objects(token_text, (97,) * count, LOGPROBS)
