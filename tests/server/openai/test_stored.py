"""server/openai/stored.py: responses that are kept, as openai-python reads, follows, cancels and deletes them."""

from __future__ import annotations

import threading

import httpx
import openai
import pytest
from support.scripted import TIMEOUT_S, scripted
from support.texts import byte_codec

from npucompile.server.chat.format import ChatFormat
from npucompile.server.chat.template import ChatTemplate
from npucompile.server.guard.access import Access
from npucompile.server.run import Serving, running

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
FORM = ChatFormat(ChatTemplate(TEMPLATE))


@pytest.fixture(scope="module")
def served():
    with scripted(chat=FORM) as (url, engine):
        yield openai.OpenAI(base_url=url, api_key="none", max_retries=0), engine, url


def deltas(events):
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def test_a_conversation_is_not_compacted_in_words_that_say_so(client):
    with pytest.raises(openai.NotFoundError, match="not compacted here; legal is a shorter input"):
        client.post("/responses/compact", body={"model": "tiny", "input": []}, cast_to=object)


def test_a_response_is_read_again_and_deleted(client):
    made = client.responses.create(model="tiny", input="ab")
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
    assert made.to_dict()["store"] is True
    client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError) as caught:
            call(made.id)
        assert (caught.value.code, caught.value.param) == ("response_not_found", "response_id")


def test_a_conversation_goes_on(client):
    first = client.responses.create(model="tiny", input="a", instructions="I")
    second = client.responses.create(model="tiny", input="b", previous_response_id=first.id)
    # The engine says its prompt: instructions are of one turn alone.
    assert (first.output_text, second.output_text) == ("Ia", "aIab")
    assert second.previous_response_id == first.id
    fork = client.responses.create(model="tiny", input=[{"role": "user", "content": "c"}], previous_response_id=first.id, stream=True)
    assert deltas(fork) == "aIac"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="tiny", input="b", previous_response_id="resp_x")
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


def test_a_conversation_goes_on_behind_token_ids_as_behind_text(client):
    first = client.responses.create(model="tiny", extra_body={"input_token_ids": list(byte_codec().encode("äb"))}, input=openai.omit)
    second = client.responses.create(model="tiny", input="c", previous_response_id=first.id)
    assert (first.output_text, second.output_text) == ("äb", "äbäbc")


def test_none_of_several_outputs_goes_on(client):
    several = client.responses.create(model="tiny", input="a", extra_body={"n": 2})
    with pytest.raises(openai.BadRequestError, match="has 2 outputs") as caught:
        client.responses.create(model="tiny", input="b", previous_response_id=several.id)
    assert caught.value.param == "previous_response_id"


def test_one_in_the_background_is_polled_and_cancelled(client):
    made = client.responses.create(model="tiny", input="ab…", background=True)
    assert (made.status, made.background) == ("in_progress", True)
    assert client.responses.retrieve(made.id).status == "in_progress"
    cancelled = client.responses.cancel(made.id)
    assert (cancelled.status, cancelled.output_text) == ("cancelled", "ab")
    assert client.responses.cancel(made.id).to_dict() == client.responses.retrieve(made.id).to_dict() == cancelled.to_dict()


def test_a_stream_is_taken_up_again_behind_any_event(client):
    stream = client.responses.create(model="tiny", input="abc", background=True, stream=True)
    events = list(stream)
    response_id = events[0].response.id
    for number in (-1, 0, 3, events[-2].sequence_number, events[-1].sequence_number):
        again = client.responses.retrieve(response_id, stream=True, starting_after=number)
        assert [event.to_dict() for event in again] == [event.to_dict() for event in events[number + 1 :]]
    with pytest.raises(openai.BadRequestError, match="events 0 to"):
        client.responses.retrieve(response_id, stream=True, starting_after=99)


def test_a_stream_that_was_dropped_goes_on(client, served):
    stream = client.responses.create(model="tiny", input="abcdef…", background=True, stream=True)
    seen = [next(stream) for _ in range(6)]
    stream.close()
    again = client.responses.retrieve(seen[0].response.id, stream=True, starting_after=seen[-1].sequence_number)
    for event in again:
        seen.append(event)
        if event.type == "response.output_text.delta" and event.delta == "f":
            threading.Thread(target=client.responses.cancel, args=(seen[0].response.id,)).start()
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert (deltas(seen), seen[-1].type) == ("abcdef", "response.cancelled")
    assert served[1].wait_cancelled()


def test_what_was_not_made_to_be_resumed_is_refused(client):
    made = client.responses.create(model="tiny", input="ab")
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.retrieve(made.id, stream=True)
    assert caught.value.code == "not_resumable"


@pytest.mark.parametrize(
    ("query", "param"), [({"stream": "yes"}, "stream"), ({"starting_after": "x", "stream": "true"}, "starting_after"), ({"a": "b"}, "a")]
)
def test_a_query_is_read_strictly(client, served, query, param):
    made = client.responses.create(model="tiny", input="ab", background=True)
    answer = httpx.get(f"{served[2]}/responses/{made.id}", params=query)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_response_that_runs_can_be_deleted(client, served):
    made = client.responses.create(model="tiny", input="x…", background=True)
    client.responses.delete(made.id)
    with served[1]._wake:
        assert served[1]._wake.wait_for(lambda: made.id in served[1].cancelled, TIMEOUT_S)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_a_key_opens_its_own_responses_alone():
    with scripted(chat=FORM) as (_, engine):
        from support.scripted import MODEL
        from support.texts import byte_codec

        from npucompile.server.engine.service import Service

        service = Service(engine, byte_codec(), MODEL, chat=FORM)
        with running(service, settings=Serving(access=Access.of(["one", "two"]))) as server:
            base = f"http://127.0.0.1:{server.port}/v1"
            one, two = (openai.OpenAI(base_url=base, api_key=key, max_retries=0) for key in ("one", "two"))
            made = one.responses.create(model="tiny", input="a")
            assert one.responses.retrieve(made.id).id == made.id
            for call in (two.responses.retrieve, two.responses.cancel, two.responses.delete):
                with pytest.raises(openai.NotFoundError):
                    call(made.id)
            with pytest.raises(openai.BadRequestError, match="not known here"):
                two.responses.create(model="tiny", input="a", previous_response_id=made.id)
