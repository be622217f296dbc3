"""Clients that agents are made of, unchanged: OpenAI's Agents SDK and LiteLLM, with tools and handoffs to the end of their work."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import pytest
from support.optional import PYTHON, RUNS_CLIENTS
from support.scripted import MODEL, scripted
from support.strict_template import STRICT, call

from npucompile.server.chat.format import ChatFormat
from npucompile.server.chat.template import ChatTemplate

HERE = Path(__file__).parent
END = 255
"""A byte that no text has ends outputs: the SDK's tools are strict, which takes grammars."""

pytestmark = RUNS_CLIENTS


def says(prompt: str) -> str:
    """Hands on, asks for the weather, and answers."""
    if "[transfer_to_writer]" in prompt:
        return "To the writer.\n</think>\n\n" + call("transfer_to_writer")
    asked = prompt.rpartition("<user>")[2]
    # The second turn forgets to close its thinking.
    return "I know.\n</think>\n\nIt is sunny." if "sunny" in asked else "I ask.\n" + call("weather", city="Rome")


@pytest.fixture(scope="module")
def url():
    chat = ChatFormat.of(ChatTemplate(STRICT), "qwen3", "qwen3_coder")
    with scripted(says, chat=chat, model=dataclasses.replace(MODEL, eos_token_ids=frozenset({END}))) as (url, _):
        yield url


def run(program: str, *arguments: str) -> list:
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [PYTHON, "-W", "ignore", HERE / program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "["))]


@pytest.mark.parametrize("api", ["responses", "chats"])
def test_the_agents_sdk_hands_on_calls_and_ends(url, api):
    whole, streamed, again, names = run("agents_program.py", url, api)
    assert [result["text"] for result in (whole, streamed, again)] == ["It is sunny."] * 3
    assert [result["agent"] for result in (whole, streamed, again)] == ["writer"] * 3
    assert whole["items"] == streamed["items"]
    assert {"HandoffCallItem", "HandoffOutputItem", "ToolCallItem", "ToolCallOutputItem", "MessageOutputItem"} <= set(whole["items"])
    assert {"handoff_requested", "tool_called", "tool_output", "message_output_created", "reasoning_item_created"} <= set(names)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm_calls_and_sends_back_what_it_got(url, provider):
    for answer in run("litellm_program.py", url, provider):
        assert (answer["text"], answer["reasoning"]) == ("It is sunny.", "I know.")
