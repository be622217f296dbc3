"""Tools that are no functions, as coding agents declare them: custom ones and those of namespaces are called, others fail nothing."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
from support.scripted import scripted

from npucompile.server.chat.format import ChatFormat
from npucompile.server.chat.template import ChatTemplate
from npucompile.server.guard.limits import SocketLimits

TEMPLATE = """{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}<{{ m.content }}>
{%- for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments | tojson }}){% endfor %}{% endfor %}"""
USER = {"role": "user", "content": "hi"}
PATCH = '*** Begin Patch\n*** Add File: "é🙂"\n+a\\b\n*** End Patch\n'
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
FUNCTION = {
    "type": "function",
    "name": "shell",
    "strict": False,
    "parameters": {"type": "object", "properties": {"command": {"type": "array"}}},
}
CUSTOM = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": GRAMMAR}
SPACE = {"type": "namespace", "name": "mcp__notes", "description": "Notes.", "tools": [{**FUNCTION, "name": "find"}]}
OTHERS = [{"type": "web_search", "external_web_access": False}, {"type": "local_shell"}, {"type": "tool_search"}]


def call(name, arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


CALLS = call("apply_patch", {"input": PATCH}) + "\n" + call("mcp__notes__find", {"a": 1})


def says(prompt):
    """Both calls the first time, and then the prompt."""
    return CALLS if prompt.endswith("<hi>") else prompt


@pytest.fixture(scope="module")
def client():
    form = ChatFormat(ChatTemplate(TEMPLATE), None, "hermes")
    with scripted(says, chat=form) as (url, _), openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def check(response):
    patch, find = response.output
    assert (patch.type, patch.name, patch.input, patch.status) == ("custom_tool_call", "apply_patch", PATCH, "completed")
    assert (find.type, find.name, find.namespace, find.arguments) == ("function_call", "find", "mcp__notes", '{"a": 1}')
    assert [warning["param"] for warning in response.warnings] == ["tools[1]", "tools[2]", "tools[3]", "tools[4].format"]


def test_custom_tools_and_namespaces_are_called_and_others_are_named(client):
    tools = [FUNCTION, *OTHERS, CUSTOM, SPACE]
    response = client.responses.create(model="tiny", input=[USER], tools=tools, extra_body={"client_metadata": {"session": "x"}})
    check(response)
    assert [tool.type for tool in response.tools] == [tool["type"] for tool in tools]
    done = [{"type": "custom_tool_call_output", "call_id": response.output[0].call_id, "output": "done"}]
    expected = f"[shell][apply_patch][mcp__notes__find]<hi><>(apply_patch {json.dumps({'input': PATCH}, ensure_ascii=False)})"
    expected += '(mcp__notes__find {"a": 1})<done>'
    whole = client.responses.create(model="tiny", input=[USER, *response.output, *done], tools=tools)
    kept = client.responses.create(model="tiny", input=done, tools=tools, previous_response_id=response.id)
    assert whole.output_text == kept.output_text == expected


def test_a_stream_has_the_events_of_a_custom_call(client):
    with client.responses.stream(model="tiny", input=[USER], tools=[FUNCTION, *OTHERS, CUSTOM, SPACE]) as stream:
        events = list(stream)
        check(stream.get_final_response())
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    (done,) = (event for event in events if event.type == "response.custom_tool_call_input.done")
    assert "".join(deltas) == done.input == PATCH
    assert len(deltas) > len(PATCH) // 2
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert all(type(event).__module__.startswith(("openai.types.responses", "openai.lib")) for event in events)


def test_items_of_other_tools_are_left_out_of_the_prompt(client):
    items = [
        {"type": "additional_tools", "role": "developer", "tools": [SPACE, OTHERS[0]]},
        USER,
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"},
        {"role": "user", "content": "b"},
    ]
    response = client.responses.create(model="tiny", input=items, tool_choice={
        "type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "find", "namespace": "mcp__notes"}]})  # fmt: skip
    assert response.output_text == "[mcp__notes__find]<hi><b>"
    assert [warning["param"] for warning in response.warnings] == ["input[0].tools[1]", "input[2]", "input[3]"]
    follow = client.responses.create(model="tiny", input="c", previous_response_id=response.id)
    assert follow.output_text == "[mcp__notes__find]<hi><b><[mcp__notes__find]<hi><b>><c>"


def test_chats_have_custom_tools_too(client):
    chat = {
        "type": "custom",
        "custom": {"name": "apply_patch", "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "x"}}},
    }
    tools = [chat, {"type": "web_search"}]
    answer = client.chat.completions.create(model="tiny", messages=[USER], tools=tools)
    message = answer.choices[0].message
    assert (message.tool_calls[0].type, message.tool_calls[0].custom.input) == ("custom", PATCH)
    assert (answer.choices[0].finish_reason, [warning["param"] for warning in answer.warnings]) == (
        "tool_calls", ["tools[0].custom.format", "tools[1]"])  # fmt: skip
    chunks = list(client.chat.completions.create(model="tiny", messages=[USER], tools=tools, stream=True))
    assert [hasattr(chunk, "warnings") for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    calls = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or [] if delta.index == 0]
    assert calls[0].type == "custom"
    assert "".join(call.custom["input"] for call in calls) == PATCH
    done = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "done"}
    back = client.chat.completions.create(model="tiny", messages=[USER, message, done])
    assert "(apply_patch " in back.choices[0].message.content
    chosen = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}
    bare = client.chat.completions.create(model="tiny", messages=[{**USER, "content": "a"}], tools=tools, tool_choice=chosen)
    assert bare.choices[0].message.content == "<a>"


def test_a_strict_server_refuses_what_it_would_leave_out():
    limits = SocketLimits(strict_fields=True)
    form = ChatFormat(ChatTemplate(TEMPLATE), None, "hermes")
    with scripted(says, chat=form, limits=limits) as (url, _), openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        assert client.responses.create(model="tiny", input=[USER], tools=[SPACE]).output[1].name == "find"
        for create, turn in ((client.responses.create, {"input": [USER]}), (client.chat.completions.create, {"messages": [USER]})):
            with pytest.raises(openai.BadRequestError, match=r"tools\[0\]: a tool of type 'web_search'.*--strict-fields"):
                create(model="tiny", tools=OTHERS[:1], **turn)
        assert "npucompile:request_parts_left_out_total 0.0" in httpx.get(url.removesuffix("/v1") + "/metrics").text


def test_what_is_left_out_is_counted(client):
    def count():
        (line,) = (line for line in httpx.get(f"{client.base_url}".removesuffix("/v1/") + "/metrics").text.splitlines()
                   if line.startswith("npucompile:request_parts_left_out_total "))  # fmt: skip
        return float(line.split()[1])

    before = count()
    client.responses.create(model="tiny", input=[USER], tools=OTHERS)
    assert count() == before + len(OTHERS)
