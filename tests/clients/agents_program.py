"""Runs in .venv-clients: OpenAI's Agents SDK hands a question to another agent, which calls its tool and answers. `URL responses|chats`."""

from __future__ import annotations

import asyncio
import json
import sys

from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, WebSearchTool, function_tool, set_tracing_disabled
from openai import AsyncOpenAI


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


async def main(url: str, api: str) -> None:
    set_tracing_disabled(True)
    kind = OpenAIResponsesModel if api == "responses" else OpenAIChatCompletionsModel
    model = kind(model="tiny", openai_client=AsyncOpenAI(base_url=url, api_key="none", max_retries=0))
    # The SDK itself refuses tools of a provider for chats.
    others = [WebSearchTool()] if api == "responses" else []
    writer = Agent(name="writer", instructions="Write.", handoff_description="writes", tools=[weather, *others], model=model)
    front = Agent(name="front", instructions="Send people on.", handoffs=[writer], model=model)
    whole = await Runner.run(front, "How is Rome?")
    streamed = Runner.run_streamed(front, "How is Rome?")
    events = [event async for event in streamed.stream_events()]
    again = await Runner.run(writer, [*whole.to_input_list(), {"role": "user", "content": "Again?"}])
    for result in (whole, streamed, again):
        items = [type(item).__name__ for item in result.new_items]
        print(json.dumps({"text": result.final_output, "agent": result.last_agent.name, "items": items}))
    names = {getattr(event, "name", event.type) for event in events}
    print(json.dumps(sorted(names)))


asyncio.run(main(*sys.argv[1:]))
