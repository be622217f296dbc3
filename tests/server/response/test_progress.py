"""server/response/progress.py: engine events become server events, for one completion and for several in any interleaving."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.texts import RECORD, byte_codec, cut_at_stop

from npucompile.runtime.request import FINISH_REASONS, FinishEvent, Logprobs, Request, TokenEvent
from npucompile.server.response.events import STATUS_BY_REASON, ResponseInfo
from npucompile.server.response.progress import PreparedResponse, Response

HEAD = ResponseInfo("resp_1", "s", "tiny", 0, 100, 0.0, 1.0)
IDS = ("resp_1", "resp_1_1", "resp_1_2")


def make_response(*stops, count=1):
    return Response(PreparedResponse(HEAD, tuple(Request(name, (1,), 100) for name in IDS[:count]), stops), byte_codec())


def tokens(text, logprobs=(), index=0):
    return TokenEvent(IDS[index], byte_codec().encode(text), tuple(logprobs))


def finish(reason, count, message=None, index=0):
    return FinishEvent(IDS[index], reason, 7, count, RECORD, message)


def kinds(events):
    return [event["type"].removeprefix("response.") for event in events]


def deltas(events, index=0):
    return [event for event in events if event["type"] == "response.output_text.delta" and event["output_index"] == index]


def numbered(ids):
    """Log probabilities by position: that of token i is -i."""
    return tuple(Logprobs(-float(place), ((token, -0.5), (0, -2.0))) for place, token in enumerate(ids))


# --- one completion ---


def test_a_stop_string_is_reported_once_and_what_follows_is_dropped():
    response = make_response("b")
    response.begin()
    assert response.take_stopped() == ()
    response.feed(tokens("ab"))
    assert response.take_stopped() == ("resp_1",)
    assert response.feed(tokens("aaa")) == []
    assert response.take_stopped() == ()
    events = response.feed(finish("cancelled", 5))
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "a"
    assert events[-1]["response"]["usage"]["output_tokens"] == 2


def test_a_stop_string_found_at_the_very_end_needs_no_cancel():
    response = make_response("\ufffd")
    response.feed(TokenEvent("resp_1", byte_codec().encode("a🙂")[:3]))
    events = response.feed(finish("length", 3))
    assert events[-1]["type"] == "response.completed"
    assert response.take_stopped() == ()


@pytest.mark.parametrize("late", [tokens("a"), finish("stop", 1)])
def test_nothing_follows_the_end(late):
    response = make_response()
    assert (response.done, response.live) == (False, ("resp_1",))
    response.feed(finish("stop", 0))
    assert (response.done, response.live) == (True, ())
    assert response.feed(late) == []


# --- several completions ---


def test_one_that_fails_fails_the_response_when_all_have_ended_and_keeps_the_rest():
    response = make_response(count=3)
    response.begin()
    response.feed(tokens("a", index=0))
    assert kinds(response.feed(finish("error", 0, "decode-b4-q4: boom", index=1)))[-1] == "output_item.done"
    response.feed(tokens("b", index=0))
    response.feed(finish("stop", 2, index=0))
    last = response.feed(finish("error", 0, None, index=2))[-1]
    assert last["type"] == "response.failed"
    message = "output 1 of 3: decode-b4-q4: boom; output 2 of 3: the engine gave no reason"
    assert last["response"]["error"] == {"code": "server_error", "message": message}
    assert [item["status"] for item in last["response"]["output"]] == ["completed", "incomplete", "incomplete"]
    assert last["response"]["output"][0]["content"][0]["text"] == "ab"


ITEM = re.compile(r"output_item.added content_part.added( output_text.delta)* output_text.done content_part.done output_item.done")
RESPONSE = re.compile(
    r"created in_progress( (output_item|content_part|output_text)[.](added|delta|done))* (completed|incomplete|cancelled|failed)"
)
TEXTS = st.text(alphabet="abü🙂", max_size=12)
STOPS = st.lists(st.text(alphabet="abü🙂", min_size=1, max_size=3), max_size=2)
REASONS = st.sampled_from(FINISH_REASONS)


@given(st.lists(st.tuples(TEXTS, REASONS), min_size=1, max_size=3), STOPS, st.booleans(), st.data())
def test_any_interleaving_gives_each_completion_what_it_has_by_itself(completions, stops, wanted_logprobs, data):
    response = make_response(*stops, count=len(completions))
    events = response.begin()
    ids = [byte_codec().encode(text) for text, _ in completions]
    sent = [0] * len(completions)
    live = list(range(len(completions)))
    reasons = [reason for _, reason in completions]
    while live:
        index = data.draw(st.sampled_from(live))
        if sent[index] < len(ids[index]):
            end = data.draw(st.integers(sent[index] + 1, len(ids[index])))
            chunk = slice(sent[index], end)
            events += response.feed(TokenEvent(IDS[index], ids[index][chunk], numbered(ids[index])[chunk] if wanted_logprobs else ()))
            sent[index] = end
            for name in response.take_stopped():
                assert name == IDS[index]
                sent[index] = len(ids[index])
                reasons[index] = "cancelled"
        else:
            live.remove(index)
            assert not response.done
            events += response.feed(finish(reasons[index], len(ids[index]), index=index))
    assert response.done
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert {event["stream_id"] for event in events} == {"s"}
    assert RESPONSE.fullmatch(" ".join(kinds(events)))
    body = events[-1]["response"]
    statuses, shown_tokens = [], 0
    for index, (text, _) in enumerate(completions):
        wanted, hit = cut_at_stop(text, stops)
        own = [event for event in events if event.get("output_index") == index]
        assert not own or ITEM.fullmatch(" ".join(kinds(own)))
        assert "".join(delta["delta"] for delta in deltas(own, index)) == wanted
        shown = [token for delta in deltas(own, index) for token in delta["token_ids"]]
        shown_tokens += len(shown)
        assert tuple(shown) == ids[index][: len(shown)]
        assert len(shown) == len(ids[index]) or hit
        statuses.append("completed" if hit and reasons[index] in ("cancelled", "length", "timeout") else STATUS_BY_REASON[reasons[index]])
        if len(completions) > 1 or own:
            item = body["output"][index]
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
    assert body["status"] == worst
    assert body["usage"]["input_tokens"] == 7
    assert body["usage"]["output_tokens"] == shown_tokens
    assert len(body["output"]) == len(completions) or len(completions) == 1
