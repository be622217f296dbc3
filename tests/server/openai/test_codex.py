"""A coding agent's turn, sent as Codex sends it: tools of every kind, instructions beside a developer's message, hints, and a stream."""

from __future__ import annotations

import json

import httpx
import pytest
from support.scripted import scripted
from support.strict_template import STRICT, call

from npucompile.server.chat.format import ChatFormat
from npucompile.server.chat.template import ChatTemplate

PATCH = "*** Begin Patch\n*** Update File: a.py\n-x\n+y\n*** End Patch"
ASKED = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Change x to y."}]}
ALLOWED = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "You may write here."}]}
FUNCTION = {
    "type": "function", "name": "exec_command", "description": "Runs a command.", "strict": False,
    "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"], "additionalProperties": False},
}  # fmt: skip
TOOLS = [
    FUNCTION,
    {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": {
        "type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" LF\nLF: "\\n"'}},
    {"type": "web_search", "external_web_access": True},
    {"type": "local_shell"},
    {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": {"type": "object", "properties": {}}},
    {"type": "namespace", "name": "mcp__notes__", "description": "Notes.", "tools": [
        {**FUNCTION, "name": "find", "defer_loading": True, "parameters": {"type": "object", "properties": {"q": {"type": "string"}}}}]},
]  # fmt: skip


LITE = [
    {"type": "additional_tools", "role": "developer", "tools": [
        {"type": "namespace", "name": "functions", "description": "", "tools": TOOLS[:2]}, *TOOLS[2:]]},
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "You are an agent."}]},
]  # fmt: skip
"""Where newer models have tools and instructions."""


def body(*items, tools=TOOLS):
    return {
        "model": "tiny", "instructions": "You are an agent.", "input": [ALLOWED, ASKED, *items], "tools": tools, "tool_choice": "auto",
        "parallel_tool_calls": True, "reasoning": {"effort": "medium", "summary": "auto"}, "store": False, "stream": True,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0199", "client_metadata": {"x-codex-installation-id": "0199"},
        "text": {"verbosity": "medium"}, "service_tier": "priority",
    }  # fmt: skip


ANSWERS = (
    "I look first.\n</think>\n\n" + call("exec_command", cmd="cat a.py"),
    "Now I know.\n" + call("apply_patch", input=PATCH),
    "Notes?\n</think>\n\n" + call("mcp__notes__find", q="x"),
    "All is done.\n</think>\n\nx is y.",
)
"""Turns of the model, the second of which forgets to close its thinking."""


@pytest.fixture(scope="module")
def url():
    def says(prompt):
        return ANSWERS[prompt.count("<tool>")]

    with scripted(says, chat=ChatFormat.of(ChatTemplate(STRICT), "qwen3", "qwen3_coder")) as (url, _):
        yield url


def turn(url, request):
    """The items of a turn, as a client adds them up from a stream, and the response that the last event has."""
    with httpx.stream("POST", f"{url}/responses", json=request, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        events = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line.startswith("data: ")]
    assert events[-1]["type"] == "response.completed"
    return [event["item"] for event in events if event["type"] == "response.output_item.done"], events[-1]["response"]


def output(item, text):
    kind = "custom_tool_call_output" if item["type"] == "custom_tool_call" else "function_call_output"
    return {"type": kind, "call_id": item["call_id"], "output": text}


@pytest.mark.parametrize("lite", [False, True], ids=["tools", "additional_tools"])
def test_an_agent_works_to_the_end(url, lite):
    history, seen = [], []
    for said in ("x = 1", "patched", "none", None):
        request = body(*history)
        if lite:
            request |= {"instructions": "", "tools": None, "input": [*LITE, *request["input"]]}
        items, response = turn(url, request)
        assert len(response["warnings"]) == 4
        assert items == response["output"]
        seen.append(items[-1])
        # Sent back as they came, with what other providers add.
        history += items
        if said is not None:
            history += [output(items[-1], said), {**ALLOWED, "content": [{"type": "input_text", "text": "You may run commands now."}]}]
    command, patch, find, message = seen
    assert (command["name"], json.loads(command["arguments"])) == ("exec_command", {"cmd": "cat a.py"})
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", PATCH)
    assert (find["name"], find["namespace"], json.loads(find["arguments"])) == ("find", "mcp__notes__", {"q": "x"})
    assert message["content"][0]["text"] == "x is y."


@pytest.mark.parametrize(
    "lite", [{}, {"instructions": "", "tools": [], "input": [*LITE, ALLOWED, ASKED]}], ids=["tools", "additional_tools"]
)
def test_the_prompt_has_what_the_model_may_see(url, lite):
    request = {name: value for name, value in {**body(), **lite}.items() if name not in ("stream", "store")}
    ids = httpx.post(f"{url}/responses/render", json=request).json()["token_ids"]
    text = httpx.post(f"{url.removesuffix('/v1')}/detokenize", json={"tokens": ids}).json()["prompt"]
    head = "[exec_command][apply_patch][mcp__notes__find]<system>You are an agent.\n\nYou may write here.\n"
    assert text == f"{head}<user>Change x to y.\n<assistant><think>\n"
