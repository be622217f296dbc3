"""server/requests/bodies.py: any body is a request or an error that is short and names its field."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from npucompile.graphs.errors import RequestError
from npucompile.server.openai.generate import GenerateRequest, SamplingParams
from npucompile.server.openai.request_models import ChatRequest, CompletionRequest
from npucompile.server.openai.tokens import TokenizeRequest
from npucompile.server.requests.bodies import Body, FailFast, Ignored, Neutral, marks, validate
from npucompile.server.requests.create_body import CreateFields
from npucompile.server.requests.error_objects import error_reply


class Inner(Body):
    text: str


class Example(Body):
    size: Annotated[int, Field(ge=1)] = 1
    parts: str | Annotated[list[Inner], FailFast()] = ""
    nothing: Annotated[Any, Neutral((0, {}), "it is not done")] = None
    never: Annotated[Any, Neutral((), "it is not done")] = None
    user: Annotated[Any, Ignored("unused")] = None


def refusal(model, body):
    with pytest.raises(RequestError) as caught:
        validate(model, body, "/path")
    return caught.value.code, caught.value.param, str(caught.value)


def test_null_is_absent_and_marks_say_what_may_come():
    body = validate(Example, {"size": 2, "parts": [{"text": "a"}], "nothing": 0.0, "never": None, "user": [1]}, "/path")
    assert (body.size, body.parts) == (2, [Inner(text="a")])
    assert list(map(type, marks(Example).values())) == [type(None), type(None), Neutral, Neutral, Ignored]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"sise": 1}, ("unknown_field", "sise", "/path has no field 'sise'; did you mean size?")),
        ({"x": 1}, ("unknown_field", "x", "/path has no field 'x'; it has size, parts, user, nothing, never")),
        ({"size": "1"}, ("invalid_field", "size", "size is '1'; legal is an integer")),
        ({"size": True}, ("invalid_field", "size", "size is True; legal is an integer")),
        ({"size": 0}, ("invalid_field", "size", "size is 0; legal is a number of at least 1")),
        ({"parts": [{}]}, ("missing_field", "parts[0].text", "parts[0].text is missing in the body for /path")),
        ({"parts": [{"text": "a", "x": 1}]}, ("unknown_field", "parts[0].x", "parts[0].x is not a field that /path has")),
        (
            {"parts": [{"text": "a", "txet": 1}]},
            ("unknown_field", "parts[0].txet", "parts[0].txet is not a field that /path has; did you mean text?"),
        ),
        (
            {"nothing": False},
            ("unsupported_value", "nothing", "nothing is False, which is not supported (it is not done); legal is 0, {}, absent"),
        ),
        ({"never": 0}, ("unsupported_value", "never", "never is 0, which is not supported (it is not done); legal is absent")),
    ],
)
def test_an_error_names_the_field_its_value_and_what_is_legal(body, expected):
    assert refusal(Example, body) == expected


def test_errors_stay_short_and_cheap():
    for body in ({"x" * 10**6: 1}, {"size": "y" * 10**6}, {"parts": [{}] * 10**5}, {"parts": [1] * 10**5}, {"never": ["z" * 10**5] * 9}):
        code, param, message = refusal(Example, body)
        assert len(message) < 700
        assert len(param) <= 128, code


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "a"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.parametrize("model", [CompletionRequest, ChatRequest, GenerateRequest, SamplingParams, TokenizeRequest, CreateFields])
@given(data=st.data())
def test_any_body_is_a_request_or_an_error(model, data):
    names = st.sampled_from(["extra", *model.model_fields])
    body = data.draw(st.dictionaries(names, JSON, max_size=4))
    try:
        validate(model, body, "/path")
    except RequestError as error:
        reply = error_reply(error)
        assert reply.status == 400
        assert len(json.dumps(reply.as_object())) < 4000


BODIES = {
    ChatRequest: {"messages": [{"role": "user", "content": "a"}]},
    CompletionRequest: {"prompt": "a"},
    GenerateRequest: {"text": "a"},
    SamplingParams: {},
    CreateFields: {},
}
PYTHONS = {"valid", "dictionary", "instance", "tuple", "validation", "boolean", "bool", "str", "int"}
WRONG = ("a", 3, -7, 2.5, True, {}, [], [3], {"x": 1}, "a" * 5000, ["a"] * 5000)


@pytest.mark.parametrize("model", BODIES, ids=lambda model: model.__name__)
def test_what_is_legal_is_said_in_words_of_json(model):
    """Pydantic's own say "valid string", "dictionary" and "instance of"."""
    for name in model.model_fields:
        for value in WRONG:
            with contextlib.suppress(RequestError):
                validate(model, {**BODIES[model], name: value}, "/path")
                continue
            assert not set(re.findall("[a-z]+", refusal(model, {**BODIES[model], name: value})[2].split("; legal is")[-1])) & PYTHONS
