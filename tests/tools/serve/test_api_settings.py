"""tools/serve/api_settings.py: names, templates and sampling are the artifact's unless a user says otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support import tiny

from npucompile.graphs.errors import ModelError, SpecError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.server.chat.template import Chat
from npucompile.tools.serve.api_settings import OPENAI, ApiSettings

HELLO = Chat([{"role": "user", "content": "a"}])


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    root = tmp_path_factory.mktemp("settings")
    model = tiny.write_checkpoint(root / "model", seed=7)
    (model / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}</think>")
    (model / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    (model / "generation_config.json").write_text('{"temperature": 0.5, "repetition_penalty": 1.05, "presence_penalty": 0.0}')
    return tiny.without_graphs(tiny.planned(model), root / "out")


def test_all_is_the_artifacts(artifact):
    settings = ApiSettings()
    assert settings.names_of(artifact) == ("model",)
    assert settings.defaults_of(artifact) == {"temperature": 0.5, "repetition_penalty": 1.05, "presence_penalty": 0.0}
    chat = settings.chat_of(artifact)
    assert chat.render(HELLO) == "<s>a</think>"
    assert (chat.reasoning, chat.tool_calls) == ("qwen3", None)
    assert (artifact.path / artifact.manifest.chat_template).is_file()


def test_unless_a_user_says_otherwise(artifact, tmp_path):
    (tmp_path / "other.jinja").write_text("{{ bos_token }}!")
    settings = ApiSettings(("a", "b"), tmp_path / "other.jinja", "deepseek_r1", "hermes", OPENAI)
    assert settings.names_of(artifact) == ("a", "b")
    assert settings.defaults_of(artifact) == {}
    chat = settings.chat_of(artifact)
    assert chat.render(HELLO) == "<s>!"
    assert (chat.reasoning, chat.tool_calls) == ("deepseek_r1", "hermes")


def test_penalties_are_taken_by_graphs_that_take_adjustments_and_what_is_left_out_is_said(artifact):
    (all_taken,) = ApiSettings().said_of_sampling(artifact)
    assert "repetition_penalty 1.05" in all_taken
    limits = replace(artifact.manifest.limits, logit_adjustments=0, adjusted_tokens=0)
    unable = Artifact(artifact.path, replace(artifact.manifest, limits=limits), "")
    assert ApiSettings().defaults_of(unable) == {"temperature": 0.5, "presence_penalty": 0.0}
    (taken, left) = ApiSettings().said_of_sampling(unable)
    assert "temperature 0.5" in taken
    assert "repetition_penalty 1.05" in left
    assert "--logit-adjustments" in left
    assert ApiSettings(sampling=OPENAI).said_of_sampling(artifact) == []


def test_an_artifact_without_a_template_has_none(artifact):
    bare = Artifact(artifact.path, replace(artifact.manifest, chat_template=None, model={"name": "m"}), "")
    assert ApiSettings().chat_of(bare).template is None
    assert ApiSettings().defaults_of(bare) == {}


@pytest.mark.parametrize("names", [("a", "a"), ("",)])
def test_names_differ_and_are_not_empty(names):
    with pytest.raises(SpecError, match="legal are names"):
        ApiSettings(names)


def test_a_template_that_cannot_be_used_is_named(artifact, tmp_path):
    (tmp_path / "bad.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match="cannot be read as UTF-8"):
        ApiSettings(chat_template=tmp_path / "bad.jinja").chat_of(artifact)
    with pytest.raises(SpecError, match="no parser 'x'"):
        ApiSettings(tool_call_parser="x").chat_of(artifact)
