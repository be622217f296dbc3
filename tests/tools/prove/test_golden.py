"""tools/prove/golden.py: a file comes back as it was written, and holds what a model of transformers answers step by step."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from npucompile.graphs.errors import SpecError
from npucompile.tools.prove.golden import LENGTHS, TEXTS, Golden, prompts_of, read, recorded, write

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3", vocab_size=97, head_dim=8, eos_token_id=3, **SIZES)
    made = AutoModelForCausalLM.from_config(config).eval()
    made.generation_config.update(do_sample=True, temperature=0.1, repetition_penalty=2.0, eos_token_id=3)
    return made


def test_answers_are_those_of_whole_forward_passes_whatever_the_checkpoint_recommends(model):
    prompts = list(prompts_of(None, 97))
    assert [len(prompt) for prompt in prompts] == list(LENGTHS)
    for prompt, answer in zip(prompts, recorded(model, prompts, 9, 4), strict=True):
        ids = list(prompt)
        for token, top in zip(answer.tokens, answer.top, strict=True):
            with torch.no_grad():
                right = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1], -1).topk(4)
            assert token == top[0][0]
            assert [place for place, _ in top] == right.indices.tolist()
            torch.testing.assert_close(torch.tensor([value for _, value in top]), right.values, atol=1e-4, rtol=0)
            ids.append(token)
        assert (answer.prompt, len(answer.tokens)) == (prompt, 9)


def test_a_file_comes_back(model, tmp_path):
    golden = Golden(97, {"model": "small"}, recorded(model, [(5, 6), (7,)], 3, 5))
    write(golden, tmp_path / "golden")
    assert read(tmp_path / "golden") == golden


def test_texts_are_encoded_where_there_is_a_tokenizer():
    assert list(prompts_of(lambda text: [len(text)], 0)) == [(len(text),) for text in TEXTS]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"format": "x"}, "is of format 'x'; legal is npucompile.golden/1"),
        ({"prompts": None}, "holds no golden tokens, which `npucompile golden` writes"),
        ({"prompts": [{"prompt": [1], "tokens": [2, 3], "top": [[[2, -1.0]]]}]}, "1 places of 2 tokens"),
        ({"prompts": [{"prompt": [], "tokens": [], "top": []}]}, "0 ids of a prompt"),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path, fields, message):
    path = tmp_path / "golden"
    path.write_text(json.dumps({"format": "npucompile.golden/1", "vocab_size": 9, "made_by": {}, **fields}))
    with pytest.raises(SpecError, match=message):
        read(path)
    path.write_text("{")
    with pytest.raises(SpecError, match="holds no golden tokens"):
        read(path)
