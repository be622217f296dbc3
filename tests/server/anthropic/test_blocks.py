"""server/anthropic/blocks.py: however a text is cut, its blocks are the same, and events build them."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.strict_template import STRICT, call

from npucompile.runtime.request import ExecutionRecord
from npucompile.server.anthropic.blocks import Blocks, usage_object
from npucompile.server.chat.format import ChatFormat
from npucompile.server.chat.template import ChatTemplate
from npucompile.server.engine.output_stream import CompletionEnd, Usage

FORM = ChatFormat.of(ChatTemplate(STRICT), "qwen3", "qwen3_coder")
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}} for name in "fg"]
PIECES = ("Hm.", "\n", " ", "</think>", "\n\n", "Yes, ", "ä€", call("f", a="1"), call("g"), "<tool_call>\n<function=f>\n<parameter=a>\n1")
USAGE = Usage(9, 5, ExecutionRecord(cached_tokens=4))


def blocks_of(cuts: list[str]) -> tuple[Blocks, list[dict[str, Any]]]:
    blocks = Blocks(FORM.parser("<think>\n", TOOLS, separate_reasoning=True))
    events = [event for text in cuts for event in blocks.push(text)]
    return blocks, [*events, *blocks.finish()]


@given(st.lists(st.sampled_from(PIECES), max_size=8), st.data())
def test_cuts_change_nothing_and_events_add_up_to_the_content(pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    cuts = [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]
    whole, _ = blocks_of([text])
    blocks, events = blocks_of(cuts)
    ids = {"id": "same"}
    assert [{**block, **(ids if "id" in block else {})} for block in blocks.content] == [
        {**block, **(ids if "id" in block else {})} for block in whole.content
    ]
    built: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(built)
            built.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            delta = dict(event["delta"])
            kind = delta.pop("type").removesuffix("_delta")
            if kind != "input_json":
                built[event["index"]][kind] += delta[kind]
    assert [{**block, "input": {}} if "input" in block else block for block in blocks.content] == built
    # Their API takes no text back that is blank.
    assert all(block[block["type"]].strip() for block in built if block["type"] != "tool_use")


def test_a_call_that_was_cut_is_not_to_be_run_and_has_no_input() -> None:
    blocks, _ = blocks_of(["Hm.</think>", PIECES[-1]])
    assert blocks.content[-1]["input"] == {}
    assert blocks.reason(CompletionEnd("stop", USAGE)) == ("end_turn", None)
    called, _ = blocks_of(["Hm.</think>", call("f", a="1")])
    assert called.reason(CompletionEnd("stop", USAGE)) == ("tool_use", None)
    assert called.reason(CompletionEnd("length", USAGE)) == ("max_tokens", None)
    assert called.reason(CompletionEnd("stop", USAGE, stopped_by="x")) == ("stop_sequence", "x")


def test_cached_tokens_are_not_counted_twice() -> None:
    expected = {"input_tokens": 5, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4, "output_tokens": 5}
    assert usage_object(USAGE) == expected
