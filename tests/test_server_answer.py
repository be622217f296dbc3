"""Engine events to server events, over any split, against the whole decoding cut by hand."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from npucompile.runtime.request import ExecutionRecord, FinishEvent, Request, TokenEvent
from npucompile.server.answer import Answer, Job
from npucompile.server.events import Head
from npucompile.server.text import TextCodec

RECORD = ExecutionRecord(0.0, 1.0, 2.0, (), (), 0, 0)
HEAD = Head("resp_1", "s", "tiny", 0, 100, 0.0, 1.0)


@cache
def codec() -> TextCodec:
    """One token per byte: ids are an alphabet's positions, so that characters of several bytes come in several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TextCodec(tokenizer)


def answer(stop=()):
    return Answer(Job(HEAD, Request("resp_1", (1,), 100), tuple(stop)), codec().detokenizer())


def tokens(ids):
    return TokenEvent("resp_1", tuple(ids))


def finish(reason, count, message=None):
    return FinishEvent("resp_1", reason, 7, count, RECORD, message)


def drive(ids, cuts, stop=(), reason="length"):
    """Feeds ids in pieces; like the engine, ends with "cancelled" when the answer asked for a stop."""
    one = answer(stop)
    events = one.begin()
    places = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    for a, b in pairwise(places):
        events += one.feed(tokens(ids[a:b]))
        if one.stopped:
            reason = "cancelled"
            break
    assert not one.done
    events += one.feed(finish(reason, len(ids)))
    assert one.done
    return events


def naive(text, stops):
    for end in range(1, len(text) + 1):
        matched = [stop for stop in stops if text[:end].endswith(stop)]
        if matched:
            return text[: end - max(map(len, matched))], True
    return text, False


TEXTS = st.text(alphabet="abü🙂", max_size=20)
CUTS = st.lists(st.integers(0, 1000), max_size=10)
STOPS = st.lists(st.text(alphabet="abü🙂", min_size=1, max_size=3), max_size=3)


@given(TEXTS, CUTS, STOPS, st.sampled_from(["stop", "length", "cancelled"]))
def test_deltas_add_up_to_the_text_before_the_stop_string(text, cuts, stops, reason):
    ids = codec().encode(text)
    events = drive(ids, cuts, stops, reason)
    wanted, hit = naive(text, stops)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in deltas) == wanted
    shown = [token for event in deltas for token in event["token_ids"]]
    last = events[-1]
    if hit:
        # Tokens up to the one that completed the stop string, and no more.
        assert tuple(shown) == ids[: len(shown)]
        assert naive(codec().decode(shown), stops) == (wanted, True)
        assert not naive(codec().decode(shown[:-1]), stops)[1]
        assert last["type"] == "response.completed"
        assert last["response"]["usage"]["output_tokens"] == len(shown)
    else:
        assert tuple(shown) == ids
        assert last["response"]["status"] == {"stop": "completed", "length": "incomplete", "cancelled": "cancelled"}[reason]
        assert last["response"]["usage"]["output_tokens"] == len(ids)
    assert last["response"]["usage"]["input_tokens"] == 7
    output = last["response"]["output"]
    assert (output[0]["content"][0]["text"] if output else "") == wanted


def test_text_is_sent_as_soon_as_it_is_safe():
    one = answer()
    ids = codec().encode("aü")
    assert [event["type"] for event in one.feed(tokens(ids[:1]))][-1] == "response.output_text.delta"
    assert one.feed(tokens(ids[1:2])) == []
    (delta,) = one.feed(tokens(ids[2:]))
    assert (delta["delta"], delta["token_ids"]) == ("ü", list(ids[1:]))


def test_a_broken_character_at_the_end_is_shown_with_its_tokens():
    one = answer()
    ids = codec().encode("🙂")[:2]
    assert one.feed(tokens(ids)) == []
    events = one.feed(finish("length", 2))
    (delta,) = [event for event in events if event["type"] == "response.output_text.delta"]
    assert (delta["delta"], delta["token_ids"]) == ("�", list(ids))


def test_a_stop_string_asks_to_cancel_once_and_drops_what_follows():
    one = answer(["b"])
    one.begin()
    one.feed(tokens(codec().encode("ab")))
    assert one.stopped
    assert one.feed(tokens(codec().encode("aaa"))) == []
    events = one.feed(finish("cancelled", 5))
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "a"


def test_an_engine_error_is_a_failure_even_after_a_stop_string():
    one = answer(["b"])
    one.feed(tokens(codec().encode("ab")))
    last = one.feed(finish("error", 2, "decode-b2-q1: boom"))[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["message"] == "decode-b2-q1: boom"


@pytest.mark.parametrize("late", [tokens([1]), finish("stop", 1)])
def test_nothing_follows_the_end(late):
    one = answer()
    one.feed(finish("stop", 0))
    assert one.feed(late) == []
