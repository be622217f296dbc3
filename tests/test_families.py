"""Commands serve a checkpoint of any family: files that transformers wrote give the tokens that transformers generates."""

from __future__ import annotations

import json

import pytest
import torch
from support import oracle, tiny

PROMPT, NEW = 9, 12


@pytest.mark.parametrize("name", ["dense", "next", "plain-tied", "plain-moe-some-dense", "shared-index", "lite", "biased-raw-heads"])
@torch.no_grad()
def test_generate_gives_the_tokens_of_transformers(tmp_path, name):
    random = oracle.case(name)
    random.theirs.save_pretrained(tmp_path / "written")
    ids = random.prompt(PROMPT)
    built = ("--backend", "eager", "--dtype", "float32", "--buckets", "1", "--prefill", "16", "--max-model-len", "128")
    result = tiny.cli(tmp_path, "build", tmp_path / "written", *built, "--out", tmp_path / "built")
    assert result.exit_code == 0, result.output
    arguments = ("--token-ids", ",".join(map(str, ids)), "--max-tokens", NEW, "--json")
    result = tiny.cli(tmp_path, "generate", tmp_path / "built", *arguments)
    assert result.exit_code == 0, result.output
    tokens = json.loads(result.stdout)["token_ids"]
    want = list(ids)
    for _ in range(NEW):
        want.append(int(random.logits(want)[-1].argmax()))
    assert tokens == want[PROMPT:]
