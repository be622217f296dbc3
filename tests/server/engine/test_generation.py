"""server/engine/generation.py: completions that run together."""

from __future__ import annotations

from support.texts import RECORD, byte_codec, trained_tokenizer

from npucompile.runtime.request import FinishEvent, Request, TokenEvent
from npucompile.server.engine.generation import Generation
from npucompile.server.engine.output_stream import TextDelta
from npucompile.server.text.tokenizer import TextTokenizer


def requests(count):
    return [Request(f"r{i}", (1,), 9) for i in range(count)]


def tokens(index, text):
    return TokenEvent(f"r{index}", byte_codec().encode(text))


def finish(index, reason="length", count=3):
    return FinishEvent(f"r{index}", reason, 1, count, RECORD)


def texts(outputs):
    return [(index, output.text if isinstance(output, TextDelta) else output.reason) for index, output in outputs]


def test_completions_end_one_by_one():
    generation = Generation(requests(2), byte_codec())
    assert texts(generation.feed(tokens(1, "ab"))) == [(1, "ab")]
    assert texts(generation.feed(finish(1))) == [(1, "length")]
    assert (generation.done, generation.live) == (False, ("r0",))
    assert generation.feed(tokens(1, "c")) == []
    generation.feed(tokens(0, "é"[:1]))
    assert texts(generation.feed(finish(0, "stop"))) == [(0, "stop")]
    assert generation.done
    assert [end.reason for end in generation.ends] == ["stop", "length"]


def test_a_stop_string_asks_for_a_cancel_once():
    generation = Generation(requests(1), byte_codec(), ["b"])
    assert texts(generation.feed(tokens(0, "abc"))) == [(0, "a")]
    assert (generation.take_stopped(), generation.take_stopped()) == (("r0",), ())
    (output,) = generation.feed(finish(0, "cancelled"))
    assert texts([output]) == [(0, "stop")]


def test_special_tokens_have_text_when_asked_for():
    codec = TextTokenizer(trained_tokenizer())
    for skip, expected in ((True, "a"), (False, "<|end|>a")):
        generation = Generation(requests(1), codec, skip_special=skip)
        outputs = generation.feed(TokenEvent("r0", (0, *codec.encode("a"))))
        assert texts(outputs) == [(0, expected)]
