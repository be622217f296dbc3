"""Runs in .venv-clients: LiteLLM converses with a tool until it has an answer, and sends back what it got as it is. `URL PROVIDER`."""

from __future__ import annotations

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

URL, PROVIDER = sys.argv[1:]
COMMON = {"model": f"{PROVIDER}/tiny", "api_base": URL, "api_key": "none", "num_retries": 0}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
HINT = {"cache_control": {"type": "ephemeral"}}


def chat(stream: bool, **options: str) -> dict:
    tool = {"type": "function", "function": {"name": "weather", "description": "Tells the weather.", "parameters": SCHEMA}, **HINT}
    system = {"role": "system", "content": [{"type": "text", "text": "Be kind.", **HINT}]}
    messages = [system, {"role": "user", "content": "How is Rome?"}]
    while True:
        answer = litellm.completion(messages=messages, tools=[tool], stream=stream, **options, **COMMON)
        answer = litellm.stream_chunk_builder(list(answer), messages=messages) if stream else answer
        message = answer.choices[0].message
        messages.append(message.model_dump())
        for call in message.tool_calls or ():
            city = json.loads(call.function.arguments)["city"]
            messages.append({"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": f"sunny in {city}"})
        if not message.tool_calls:
            return {"text": message.content, "reasoning": message.reasoning_content, "messages": len(messages)}


def responses(stream: bool) -> dict:
    tools = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}, {"type": "web_search"}]
    items = [{"role": "user", "content": "How is Rome?"}]
    while True:
        answer = litellm.responses(input=items, instructions="Be kind.", tools=tools, stream=stream, **COMMON)
        answer = list(answer)[-1].response if stream else answer
        items += (output := [item if isinstance(item, dict) else item.model_dump() for item in answer.output])
        calls = [item for item in output if item["type"] == "function_call"]
        items += [{"type": "function_call_output", "call_id": call["call_id"], "output": "sunny in Rome"} for call in calls]
        if not calls:
            return {"text": output[-1]["content"][0]["text"], "reasoning": output[0]["content"][0]["text"], "messages": len(items)}


for streams in (False, True):
    for said in (chat(streams), chat(streams, reasoning_effort="low"), responses(streams)):
        print(json.dumps(said))
