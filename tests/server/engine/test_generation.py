"""server/engine/generation.py: completions that run together."""

from __future__ import annotations

from support.texts import trained_tokenizer

from npucompile.runtime.request import Request, TokenEvent
from npucompile.server.engine.generation import Generation
from npucompile.server.engine.output_stream import TextDelta
from npucompile.server.text.tokenizer import TextTokenizer


def requests(count):
    return [Request(f"r{i}", (1,), 9) for i in range(count)]


def texts(outputs):
    return [(index, output.text if isinstance(output, TextDelta) else output.reason) for index, output in outputs]


def test_special_tokens_have_text_when_asked_for():
    codec = TextTokenizer(trained_tokenizer())
    for skip, expected in ((True, "a"), (False, "<|end|>a")):
        generation = Generation(requests(1), codec, skip_special=skip)
        outputs = generation.feed(TokenEvent("r0", (0, *codec.encode("a"))))
        assert texts(outputs) == [(0, expected)]
