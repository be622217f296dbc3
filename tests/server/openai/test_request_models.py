"""server/openai/request_models.py: docs/api.md says of each field what the models do with it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from npucompile.server.anthropic.messages import POSTS as MESSAGES
from npucompile.server.openai.generate import GenerateRequest, SamplingParams
from npucompile.server.openai.request_models import MAX_PROMPTS, ChatRequest, CompletionRequest, SamplingFields, prompts
from npucompile.server.openai.routes import GETS, POSTS, STORED
from npucompile.server.requests.bodies import Ignored, Neutral, marks
from npucompile.server.requests.create_body import CreateFields

DOCUMENT = (Path(__file__).resolve().parents[3] / "docs" / "api.md").read_text(encoding="utf-8")
SHARED = set(SamplingFields.model_fields)
SECTIONS = {
    "Fields of both": (SamplingFields, set()),
    "Fields of /v1/completions": (CompletionRequest, SHARED),
    "Fields of /v1/chat/completions": (ChatRequest, SHARED),
    "Fields of /v1/responses": (CreateFields, {"stream_id"}),
    "Fields of /generate": (GenerateRequest, set()),
    "Fields of sampling_params": (SamplingParams, set()),
}


def rows(section):
    """The table's rows of a section: name to its other cells."""
    (text,) = re.findall(rf"^### {re.escape(section)}\n(.*?)(?=^##|\Z)", DOCUMENT, re.MULTILINE | re.DOTALL)
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len({row[0] for row in cells}) == len(cells)
    found = {row[0].strip("`"): row[1:] for row in cells}
    for names in re.findall(r"^As in the first table: (.*)\.$", text, re.MULTILINE):
        found |= {name: rows("Fields of both")[name] for name in re.findall(r"`(\w+)`", names)}
    return found


def shown(values):
    """Legal values as the tables have them."""
    return ", ".join([*(f"`{json.dumps(value)}`" for value in values), "absent"])


@pytest.mark.parametrize("section", SECTIONS)
def test_a_table_has_every_field_and_what_becomes_of_it(section):
    model, others = SECTIONS[section]
    found = rows(section)
    if model is CreateFields:
        del found["stream_options"]  # over HTTP alone
    assert set(found) == set(model.model_fields) - others
    for name, (legal, why) in found.items():
        mark = marks(model)[name]
        if isinstance(mark, Neutral):
            assert (legal, why) == (shown(mark.values), mark.why), name
        elif isinstance(mark, Ignored):
            assert (legal, why) == ("ignored", mark.why), name
        else:
            assert legal not in ("", "ignored"), name
            assert not legal.endswith("absent"), name


def test_every_path_is_there():
    paths = (
        {post.path for post in (*POSTS, *MESSAGES)}
        | set(GETS)
        | {path for _, path, _ in STORED}
        | {"/", "/v1/models", "/v1/models/{id}", "/health", "/ready", "/metrics"}
    )
    listed = re.findall(r"^\| `(?:GET |POST |DELETE )?(/[^`]*)`((?:, `/[^`]*`)*)", DOCUMENT, re.MULTILINE)
    assert {first for first, _ in listed} | {other for _, more in listed for other in re.findall(r"`(/[^`]*)`", more)} == paths


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
        ([], ((),)),
        (["a", [1]], ("a", (1,))),
    ],
)
def test_prompts_have_four_forms(value, expected):
    assert prompts(value) == expected


@pytest.mark.parametrize("value", [1, None, {}, [1, "a"], ["a", 1], [[1], ["a"]], [True], [1.0], ["a"] * (MAX_PROMPTS + 1)])
def test_nothing_else_is_a_prompt(value):
    with pytest.raises(ValueError, match=r"prompts|token ids"):
        prompts(value)


THEIRS = {
    ChatRequest: (CompletionCreateParamsBase, {"moderation"}),
    CreateFields: (ResponseCreateParamsBase, {"access_programs", "background_options", "image", "moderation", "stream_options"}),
}
"""Parameters of openai's clients that are unknown here, as they ask for another service; `stream_options` is read before the model is."""


@pytest.mark.parametrize("model", THEIRS, ids=lambda model: model.__name__)
def test_what_openais_clients_can_send_is_known(model):
    theirs, unknown = THEIRS[model]
    assert set(theirs.__annotations__) - set(model.model_fields) == unknown
