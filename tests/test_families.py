"""Commands serve a checkpoint of any family: files that transformers wrote give the tokens that transformers generates."""

from __future__ import annotations

import json

import pytest
import torch
from support import oracle, tiny
from support.family_templates import FAMILIES
from support.kimi_texts import RESERVED, write_tokenizer

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.models import registry
from npucompile.server.chat.template import Chat
from npucompile.tools.serve.api_settings import ApiSettings

PROMPT, NEW = 9, 12
BUILT = ("--backend", "eager", "--dtype", "float32", "--buckets", "1", "--prefill", "16", "--max-model-len", "128")


@pytest.mark.parametrize("name", ["dense", "next", "plain-tied", "plain-moe-some-dense", "shared-index", "lite", "biased-raw-heads"])
@torch.no_grad()
def test_generate_gives_the_tokens_of_transformers(tmp_path, name):
    random = oracle.case(name)
    random.theirs.save_pretrained(tmp_path / "written")
    ids = random.prompt(PROMPT)
    result = tiny.cli(tmp_path, "build", tmp_path / "written", *BUILT, "--out", tmp_path / "built")
    assert result.exit_code == 0, result.output
    arguments = ("--token-ids", ",".join(map(str, ids)), "--max-tokens", NEW, "--json")
    result = tiny.cli(tmp_path, "generate", tmp_path / "built", *arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["token_ids"] == continued(random, ids)


def continued(random, ids):
    """The tokens that transformers generates, greedily."""
    want = list(ids)
    for _ in range(NEW):
        want.append(int(random.logits(want)[-1].argmax()))
    return want[len(ids) :]


@torch.no_grad()
def test_kimi_is_asked_in_text_and_in_chats(tmp_path):
    """Its checkpoints have a tiktoken.model in place of a tokenizer.json; an artifact has the latter."""
    random, model = oracle.build({**oracle.CASES["equal-betas"], "vocab_size": 400 + RESERVED}), tmp_path / "written"
    random.theirs.save_pretrained(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "kimi_k2"}))
    theirs = write_tokenizer(model, 400)
    assert registry.find(model).eos_files[401] == ("tokenizer_config.json",)
    result = tiny.cli(tmp_path, "build", model, *BUILT, "--out", tmp_path / "built")
    assert result.exit_code == 0, result.output
    template = ApiSettings().chat_of(Artifact.open(tmp_path / "built")).template
    chat = template.render(Chat(({"role": "user", "content": "你好"},)))
    assert chat == "<|im_user|>user<|im_middle|>你好<|im_end|><|im_assistant|>assistant<|im_middle|><think>"
    for prompt in ("你好, don't", chat):
        result = tiny.cli(tmp_path, "generate", tmp_path / "built", "--prompt", prompt, "--max-tokens", NEW, "--ignore-eos", "--json")
        assert result.exit_code == 0, result.output
        want = continued(random, theirs.encode(prompt, allowed_special="all"))
        answer = json.loads(result.stdout)
        # What is said is without special tokens, reserved ones among them; marks that are none are text.
        plain = {theirs.encode_single_token(mark) for mark in FAMILIES["Kimi-K2.5"].plain}
        said = theirs.decode([token for token in want if token < 400 or token in plain])
        assert (answer["token_ids"], answer["text"]) == (want, said)
