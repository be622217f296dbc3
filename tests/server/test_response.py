"""Engine events to server events: one completion and several, in any order and split, against what each of them says alone."""

from __future__ import annotations

import re
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from npucompile.runtime.request import FINISH_REASONS, ExecutionRecord, FinishEvent, Logprobs, Request, TokenEvent
from npucompile.server.events import STATUS_BY_REASON, ResponseInfo
from npucompile.server.response import PreparedResponse, Response
from npucompile.server.tokenizer import TextTokenizer

RECORD = ExecutionRecord(0.0, 1.0, 2.0, (), (), 0, 0)
HEAD = ResponseInfo("resp_1", "s", "tiny", 0, 100, 0.0, 1.0)
IDS = ("resp_1", "resp_1_1", "resp_1_2")


@cache
def codec() -> TextTokenizer:
    """One token per byte: ids are an alphabet's positions, so that characters of several bytes come in several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return TextTokenizer(tokenizer)


def answer(*stops, count=1):
    return Response(PreparedResponse(HEAD, tuple(Request(name, (1,), 100) for name in IDS[:count]), stops), codec())


def tokens(text, logprobs=(), index=0):
    return TokenEvent(IDS[index], codec().encode(text), tuple(logprobs))


def finish(reason, count, message=None, index=0):
    return FinishEvent(IDS[index], reason, 7, count, RECORD, message)


def kinds(events):
    return [event["type"].removeprefix("response.") for event in events]


def deltas(events, index=0):
    return [event for event in events if event["type"] == "response.output_text.delta" and event["output_index"] == index]


def numbered(ids):
    """Log probabilities that tell the place they are of."""
    return tuple(Logprobs(-float(place), ((token, -0.5), (0, -2.0))) for place, token in enumerate(ids))


# --- one completion ---


def test_text_is_sent_as_soon_as_it_is_safe():
    one = answer()
    ids = codec().encode("aü")
    assert kinds(one.begin()) == ["created", "in_progress"]
    assert kinds(one.feed(TokenEvent("resp_1", ids[:1]))) == ["output_item.added", "content_part.added", "output_text.delta"]
    assert one.feed(TokenEvent("resp_1", ids[1:2])) == []
    (delta,) = one.feed(TokenEvent("resp_1", ids[2:]))
    assert (delta["delta"], delta["token_ids"], delta["logprobs"]) == ("ü", list(ids[1:]), [])


def test_a_stop_string_is_told_once_and_what_follows_is_dropped():
    one = answer("b")
    one.begin()
    assert one.take_stopped() == ()
    one.feed(tokens("ab"))
    assert one.take_stopped() == ("resp_1",)
    assert one.feed(tokens("aaa")) == []
    assert one.take_stopped() == ()
    events = one.feed(finish("cancelled", 5))
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "a"
    assert events[-1]["response"]["usage"]["output_tokens"] == 2


def test_a_stop_string_found_at_the_very_end_needs_no_cancel():
    one = answer("\ufffd")
    one.feed(TokenEvent("resp_1", codec().encode("a🙂")[:3]))
    events = one.feed(finish("length", 3))
    assert events[-1]["type"] == "response.completed"
    assert one.take_stopped() == ()


def test_an_engine_error_is_a_failure_even_after_a_stop_string():
    one = answer("b")
    one.feed(tokens("ab"))
    last = one.feed(finish("error", 2, "decode-b2-q1: boom"))[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"]["message"] == "decode-b2-q1: boom"


@pytest.mark.parametrize("late", [tokens("a"), finish("stop", 1)])
def test_nothing_follows_the_end(late):
    one = answer()
    assert (one.done, one.live) == (False, ("resp_1",))
    one.feed(finish("stop", 0))
    assert (one.done, one.live) == (True, ())
    assert one.feed(late) == []


def test_a_completion_cancelled_before_its_first_token_has_no_item():
    one = answer()
    one.begin()
    (last,) = one.feed(finish("cancelled", 0))
    assert (last["type"], last["response"]["output"]) == ("response.cancelled", [])


def test_log_probabilities_stay_with_their_tokens():
    one = answer("stop")
    ids = codec().encode("gü st")
    found = numbered(codec().encode("gü stop it"))
    events = one.feed(TokenEvent("resp_1", ids[:2], found[:2]))
    events += one.feed(TokenEvent("resp_1", ids[2:], found[2 : len(ids)]))
    events += one.feed(tokens("op it", found[len(ids) :]))
    events += one.feed(finish("cancelled", 11))
    shown = [entry for delta in deltas(events) for entry in delta["logprobs"]]
    for delta in deltas(events):
        assert [entry["token_id"] for entry in delta["logprobs"]] == delta["token_ids"]
    assert [entry["token_id"] for entry in shown] == list(codec().encode("gü stop"))
    assert [entry["logprob"] for entry in shown] == [-float(place) for place in range(8)]
    assert [entry["token"] for entry in shown] == ["g", "�", "�", " ", "s", "t", "o", "p"]
    assert shown[3]["top_logprobs"] == [
        {"token": " ", "token_id": codec().encode(" ")[0], "logprob": -0.5},
        {"token": codec().decode([0]), "token_id": 0, "logprob": -2.0},
    ]
    part = events[-1]["response"]["output"][0]["content"][0]
    assert part["text"] == "gü "
    assert bytes(value for entry in part["logprobs"] for value in entry["bytes"]).decode() == "gü stop"
    assert [{name: entry[name] for name in ("token", "token_id", "logprob")} for entry in part["logprobs"]] == [
        {name: entry[name] for name in ("token", "token_id", "logprob")} for entry in shown
    ]
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == shown


# --- several completions ---


def test_each_completion_has_its_item_and_the_response_one_end():
    one = answer(count=3)
    events = one.begin()
    events += one.feed(tokens("b", index=1))
    events += one.feed(tokens("a", index=0))
    events += one.feed(finish("length", 1, index=1))
    assert one.live == ("resp_1", "resp_1_2")
    events += one.feed(finish("stop", 0, index=2))
    assert not one.done
    events += one.feed(finish("stop", 2, index=0))
    assert one.done
    opening = ["output_item.added", "content_part.added"]
    closing = ["output_text.done", "content_part.done", "output_item.done"]
    delta = ["output_text.delta"]
    ending = [*closing, *opening, *closing, *closing, "incomplete"]
    assert kinds(events) == ["created", "in_progress", *opening, *delta, *opening, *delta, *ending]
    assert [event.get("output_index") for event in events] == [None, None, *[1] * 3, *[0] * 3, *[1] * 3, *[2] * 5, *[0] * 3, None]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    response = events[-1]["response"]
    assert [item["id"] for item in response["output"]] == ["msg_1", "msg_1_1", "msg_1_2"]
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete", "completed"]
    assert [item["content"][0]["text"] for item in response["output"]] == ["a", "b", ""]
    usage = response["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (7, 3, 10)
    assert [record["output_tokens"] for record in usage["npucompile"]["completions"]] == [2, 1, 0]


def test_a_stop_string_ends_one_completion_and_not_the_others():
    one = answer("x", count=2)
    one.feed(tokens("ax", index=0))
    one.feed(tokens("bx", index=1))
    assert one.take_stopped() == ("resp_1", "resp_1_1")
    one = answer("x", count=2)
    one.feed(tokens("ax", index=1))
    assert one.take_stopped() == ("resp_1_1",)
    one.feed(finish("cancelled", 3, index=1))
    (delta,) = deltas(one.feed(tokens("more", index=0)))
    assert delta["delta"] == "more"
    assert one.feed(finish("stop", 4, index=0))[-1]["type"] == "response.completed"


def test_one_that_fails_fails_the_response_when_all_have_ended_and_keeps_the_rest():
    one = answer(count=3)
    one.begin()
    one.feed(tokens("a", index=0))
    assert kinds(one.feed(finish("error", 0, "decode-b4-q4: boom", index=1)))[-1] == "output_item.done"
    one.feed(tokens("b", index=0))
    one.feed(finish("stop", 2, index=0))
    last = one.feed(finish("error", 0, None, index=2))[-1]
    assert last["type"] == "response.failed"
    message = "output 1 of 3: decode-b4-q4: boom; output 2 of 3: the engine gave no reason"
    assert last["response"]["error"] == {"code": "server_error", "message": message}
    assert [item["status"] for item in last["response"]["output"]] == ["completed", "incomplete", "incomplete"]
    assert last["response"]["output"][0]["content"][0]["text"] == "ab"


def naive(text, stops):
    for end in range(1, len(text) + 1):
        matched = [stop for stop in stops if text[:end].endswith(stop)]
        if matched:
            return text[: end - max(map(len, matched))], True
    return text, False


ITEM = re.compile(r"output_item.added content_part.added( output_text.delta)* output_text.done content_part.done output_item.done")
RESPONSE = re.compile(
    r"created in_progress( (output_item|content_part|output_text)[.](added|delta|done))* (completed|incomplete|cancelled|failed)"
)
TEXTS = st.text(alphabet="abü🙂", max_size=12)
STOPS = st.lists(st.text(alphabet="abü🙂", min_size=1, max_size=3), max_size=2)
REASONS = st.sampled_from(FINISH_REASONS)


@given(st.lists(st.tuples(TEXTS, REASONS), min_size=1, max_size=3), STOPS, st.booleans(), st.data())
def test_any_interleaving_tells_of_each_completion_what_it_would_say_alone(completions, stops, wanted_logprobs, data):
    one = answer(*stops, count=len(completions))
    events = one.begin()
    ids = [codec().encode(text) for text, _ in completions]
    sent = [0] * len(completions)
    live = list(range(len(completions)))
    reasons = [reason for _, reason in completions]
    while live:
        index = data.draw(st.sampled_from(live))
        if sent[index] < len(ids[index]):
            end = data.draw(st.integers(sent[index] + 1, len(ids[index])))
            chunk = slice(sent[index], end)
            events += one.feed(TokenEvent(IDS[index], ids[index][chunk], numbered(ids[index])[chunk] if wanted_logprobs else ()))
            sent[index] = end
            for name in one.take_stopped():
                assert name == IDS[index]
                sent[index] = len(ids[index])
                reasons[index] = "cancelled"
        else:
            live.remove(index)
            assert not one.done
            events += one.feed(finish(reasons[index], len(ids[index]), index=index))
    assert one.done
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert {event["stream_id"] for event in events} == {"s"}
    assert RESPONSE.fullmatch(" ".join(kinds(events)))
    response = events[-1]["response"]
    statuses, shown_tokens = [], 0
    for index, (text, _) in enumerate(completions):
        wanted, hit = naive(text, stops)
        own = [event for event in events if event.get("output_index") == index]
        assert not own or ITEM.fullmatch(" ".join(kinds(own)))
        assert "".join(delta["delta"] for delta in deltas(own, index)) == wanted
        shown = [token for delta in deltas(own, index) for token in delta["token_ids"]]
        shown_tokens += len(shown)
        assert tuple(shown) == ids[index][: len(shown)]
        assert len(shown) == len(ids[index]) or hit
        statuses.append("completed" if hit and reasons[index] in ("cancelled", "length") else STATUS_BY_REASON[reasons[index]])
        if len(completions) > 1 or own:
            item = response["output"][index]
            assert own[-1]["item"] == item
            assert item["status"] == ("completed" if statuses[index] == "completed" else "incomplete")
            assert item["content"][0]["text"] == wanted
            logprobs = item["content"][0]["logprobs"]
            assert [entry["token_id"] for entry in logprobs] == (shown if wanted_logprobs else [])
            assert [entry["logprob"] for entry in logprobs] == [-float(place) for place in range(len(logprobs))]
        for delta in deltas(own, index):
            assert [entry["token_id"] for entry in delta["logprobs"]] == (delta["token_ids"] if wanted_logprobs else [])
    worst = next(status for status in ("failed", "cancelled", "incomplete", "completed") if status in statuses)
    assert events[-1]["type"] == f"response.{worst}"
    assert response["status"] == worst
    assert response["usage"]["input_tokens"] == 7
    assert response["usage"]["output_tokens"] == shown_tokens
    assert len(response["output"]) == len(completions) or len(completions) == 1
