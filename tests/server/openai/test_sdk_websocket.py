"""openai-python's own websocket client against the server: the turns of OpenAI's guide, lanes, and what is refused.

The engine says its prompt, which the chat template makes of the whole conversation."""

from __future__ import annotations

import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from support.scripted import scripted

from npucompile.server.chat.format import ChatFormat
from npucompile.server.chat.template import ChatTemplate

# openai-python was written for older versions of websockets, which had one way to connect.
pytestmark = pytest.mark.filterwarnings("ignore:connect\\(\\) must be used as a context manager:DeprecationWarning")

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def served():
    with scripted(chat=ChatFormat(ChatTemplate(TEMPLATE))) as (url, engine):
        yield openai.OpenAI(base_url=url, api_key="none", max_retries=0), engine, url


def user(text):
    return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}]


def until(connection, kind):
    """Events up to one of a kind, each as openai's types have it."""
    events = []
    for event in connection:
        events.append(event)
        if event.type == kind:
            return events
    raise AssertionError(kind)


def test_turns_of_a_conversation_as_the_guide_has_them(client):
    with client.responses.connect() as connection:
        connection.response.create(model="tiny", store=False, input=user("Find fizz_buzz()"), tools=[])
        first = until(connection, "response.completed")
        assert first[-1].response.output_text == "Find fizz_buzz()"
        assert first[-1].response.usage.input_tokens_details.cache_write_tokens == 0
        assert not any(getattr(event, "stream_id", None) for event in first)
        for event in first:
            TypeAdapter(ResponseStreamEvent).validate_python(event.to_dict())
        connection.response.create(model="tiny", store=False, previous_response_id=first[-1].response.id, input=user("!"), tools=[])
        second = until(connection, "response.completed")[-1].response
        assert second.output_text == "Find fizz_buzz()" * 2 + "!"
        assert second.previous_response_id == first[-1].response.id
    # What is not stored is remembered by its own connection alone.
    with client.responses.connect() as connection:
        connection.response.create(model="tiny", store=False, previous_response_id=second.id, input=user("!"))
        (error,) = until(connection, "error")
        assert (error.status, error.error.code, error.error.param) == (400, "previous_response_not_found", "previous_response_id")


def test_a_prompt_is_computed_before_it_is_needed(client, served):
    with client.responses.connect() as connection:
        connection.response.create(model="tiny", generate=False, instructions="I", input=user("a"))
        warm = until(connection, "response.completed")
        assert [event.type for event in warm] == ["response.created", "response.in_progress", "response.completed"]
        assert (warm[-1].response.output, warm[-1].response.usage.output_tokens) == ([], 0)
        assert served[1].requests[-1].max_tokens == 1
        connection.response.create(model="tiny", previous_response_id=warm[-1].response.id, input=user("b"))
        assert until(connection, "response.completed")[-1].response.output_text == "ab"


def test_a_lane_is_a_queue_and_lanes_run_side_by_side(client, served):
    with client.responses.connect() as connection:
        for lane, text in (("a", "one…"), ("a", "two"), ("b", "three")):
            connection.response.create(model="tiny", stream_id=lane, input=user(text))
        events = until(connection, "response.completed")
        assert (events[-1].stream_id, events[-1].response.output_text) == ("b", "three")
        waits = next(event.response.id for event in events if event.type == "response.created" and event.stream_id == "a")
        connection.send({"type": "response.cancel", "response_id": waits})
        rest = until(connection, "response.completed")
        kinds = [event.type for event in rest if event.type in ("response.cancelled", "response.created", "response.completed")]
        assert kinds == ["response.cancelled", "response.created", "response.completed"]
        assert (rest[-1].stream_id, rest[-1].response.output_text) == ("a", "two")


def test_a_create_that_is_refused_makes_place_for_the_next(client):
    with client.responses.connect() as connection:
        connection.response.create(model="tiny", input=user("a…"))
        connection.response.create(model="other", input=user("b"))
        connection.response.create(model="tiny", input=user("c"))
        created = next(iter(connection))
        connection.send({"type": "response.cancel", "response_id": created.response.id})
        kinds = [event.type for event in until(connection, "response.completed")]
        assert kinds.index("response.cancelled") < kinds.index("error") < kinds.index("response.created")


def test_steering_is_refused_as_openai_refuses_it(client):
    with client.responses.connect() as connection:
        connection.response.create(model="tiny", input=user("a…"))
        response_id = next(iter(connection)).response.id
        connection.response.steer(previous_response_id=response_id, input="be brief")
        failed = until(connection, "response.steer.failed")[-1]
        assert failed.error.code == "steering_not_supported"
        assert (failed.steer.previous_response_id, failed.steer.input) == (response_id, "be brief")
