"""server/openai/choices.py: which outputs share a chunk, and how tokens are counted."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.texts import RECORD

from npucompile.server.engine.output_stream import CompletionEnd, TextDelta, Usage
from npucompile.server.openai.choices import ChunkFrames, Header, UsageWanted, pieces, usage_object, whole_answer
from npucompile.server.openai.errors import EngineFailure

HEADER = Header("id", "whole", 1, "tiny", None, "chunk")


def delta(text="a"):
    return TextDelta(text, (1,))


def end(reason="stop"):
    return CompletionEnd(reason, Usage(1, 1, RECORD), "gone" if reason == "error" else None)


class Choice:
    def __init__(self):
        self.told = []

    def chunk(self, delta, end):
        self.told.append((delta.text if delta else None, end.reason if end else None))
        return {"told": self.told[-1]}

    def whole(self):
        return {"told": self.told}


def test_an_end_is_with_its_text():
    a, b, stop = delta("a"), delta("b"), end()
    assert list(pieces([(0, a), (0, stop)])) == [(0, a, stop)]
    assert list(pieces([(0, a), (1, stop)])) == [(0, a, None), (1, None, stop)]
    assert list(pieces([(0, stop), (0, a), (1, b), (1, stop)])) == [(0, None, stop), (0, a, None), (1, b, stop)]


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=9))
def test_nothing_is_lost_or_reordered(shape):
    outputs = [(index, end() if ends else delta(str(place))) for place, (index, ends) in enumerate(shape)]
    flat = [(piece.choice, part) for piece in pieces(outputs) for part in (piece.delta, piece.end) if part is not None]
    assert flat == outputs


def test_an_answer_has_its_choices_and_usage():
    answer = whole_answer(HEADER, [Choice(), Choice()], 2, [(1, delta()), (1, end()), (0, end("length"))])
    assert (answer["object"], answer["usage"]["completion_tokens"]) == ("whole", 2)
    assert answer["choices"] == [{"told": [(None, "length")]}, {"told": [("a", "stop")]}]
    with pytest.raises(EngineFailure, match="gone"):
        whole_answer(HEADER, [Choice()], 1, [(0, end("error"))])


def test_a_failure_ends_a_stream():
    frames = ChunkFrames(HEADER, [Choice(), Choice()], 2, UsageWanted.LAST, [1, 1])
    sent = frames.feed([(0, delta()), (1, end("error")), (0, delta())])
    assert frames.failed
    assert json.loads(sent[1].removeprefix(b"data: "))["error"]["message"] == "gone"
    assert sent[2:] == [b"data: [DONE]\n\n"]


@pytest.mark.parametrize(
    ("wanted", "usages"),
    [
        (UsageWanted.NOWHERE, ["absent"] * 4),
        (UsageWanted.LAST, [None] * 4 + [(1, 2)]),
        (UsageWanted.EACH, [(7, 1), (7, 2), (7, 1), (7, 1), (1, 2)]),
    ],
)
def test_a_stream_has_its_usage_where_it_is_wanted(wanted, usages):
    """So far of its choice in each chunk, as in vLLM; the one that ends a choice has what the engine counted."""
    frames = ChunkFrames(HEADER, [Choice(), Choice()], 2, wanted, [7, 7])
    *sent, done = [*frames.feed([(0, delta()), (0, delta()), (1, end()), (0, end())]), *frames.end()]
    assert done == b"data: [DONE]\n\n"
    told = [json.loads(chunk.removeprefix(b"data: ")).get("usage", "absent") for chunk in sent]
    assert [(usage["prompt_tokens"], usage["completion_tokens"]) if isinstance(usage, dict) else usage for usage in told] == usages


def usage(prompt, output, cached, drafted, accepted):
    return Usage(prompt, output, RECORD._replace(cached_tokens=cached, drafted_tokens=drafted, accepted_per_position=accepted))


def test_usage_adds_up():
    of_first = [usage(10, 3, 8, 6, (1, 1, 0)), usage(10, 4, 6, 0, (0, 0, 0))]
    of_second = [usage(5, 1, 0, 3, (1, 0, 0)), usage(5, 1, 2, 0, ())]
    assert usage_object([*of_first, *of_second], n=2) == {
        "prompt_tokens": 15,
        "completion_tokens": 9,
        "total_tokens": 24,
        "prompt_tokens_details": {"cached_tokens": 6},
        "completion_tokens_details": {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 6},
    }


@pytest.mark.parametrize(("output", "accepted"), [(0, 0), (1, 1), (5, 3)])
def test_no_more_predictions_are_accepted_than_there_are_tokens(output, accepted):
    details = usage_object([usage(10, output, 0, 6, (2, 1, 0))])["completion_tokens_details"]
    assert details == {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": 6 - accepted}
