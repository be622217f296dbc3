"""models/kimi_k2.py: bare and wrapped files are read, and checkpoints as they are published equal transformers' own class."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support import oracle
from transformers import AutoConfig, AutoModelForImageTextToText

from npucompile.graphs.errors import CheckpointError, ConfigError
from npucompile.models import checkpoint, deepseek_v3, kimi_k2, registry, step

TEXT = {**oracle.CASES["equal-betas"], "model_type": "kimi_k2"}
VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 20}
WRAPPER: dict[str, Any] = {
    "model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "tie_word_embeddings": True, "vision_config": VISION,
    "projection_hidden_size": 16, "ignore_index": -100, "media_placeholder_token_id": 90, "use_unified_vision_chunk": True,
    "video_placeholder": "<video>", "text_config": TEXT,
}  # fmt: skip
PLACES = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head.", "model.": ""}


@pytest.fixture(scope="module")
def theirs():
    """Transformers' model of text and pictures; its head is no embedding, whatever the wrapper says."""
    read = ("vision_config", "projection_hidden_size")
    config = AutoConfig.for_model("kimi_k25", text_config={**TEXT, "model_type": "deepseek_v3"}, **{name: WRAPPER[name] for name in read})
    config.tie_word_embeddings, config._attn_implementation = False, "eager"
    model = AutoModelForImageTextToText.from_config(config).eval().float()
    oracle.draw(model, 3)
    return model


def write(directory, theirs, **more: torch.Tensor) -> None:
    """Writes it as it is published, expert by expert: transformers 5.23 saves layers of the text as blocks, as it does the tower's."""
    tensors = dict(more)
    for name, tensor in theirs.state_dict().items():
        old, new = next((old, new) for old, new in PLACES.items() if name.startswith(old))
        name = new + name.removeprefix(old)
        stem, _, kind = name.partition(".experts.")
        if kind in ("gate_up_proj", "down_proj"):
            parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            for i, expert in enumerate(tensor):
                for part, matrix in zip(parts, expert.chunk(len(parts)), strict=True):
                    tensors[f"{stem}.experts.{i}.{part}.weight"] = matrix.clone()
        else:
            tensors[name] = tensor.clone()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(WRAPPER))


@torch.no_grad()
def test_a_wrapped_checkpoint_equals_transformers_and_its_tower_is_left_unread(tmp_path, theirs):
    write(tmp_path, theirs)
    source = registry.find(str(tmp_path))
    model = step.Model("it", source.model.family, source.model.config)
    assert not model.config.tie_word_embeddings
    weights = checkpoint.load(checkpoint.open_checkpoint(tmp_path), model.params(torch.float32))
    ids, pages = oracle.case("equal-betas").prompt(37), [6, 5, 4, 3, 2, 1, 7, 8, 9, 10]
    runner = oracle.Runner(model, weights)
    logits = [runner.prefill(ids, pages, 1, [16, 16, 16])]
    tokens = [int(logits[0].argmax())]
    while len(tokens) < 24:
        out = runner.step(oracle.Bucket("decode", 1, 1), [oracle.Row(tokens[-1:], len(ids) + len(tokens) - 1, pages, 1, [1])])
        logits.append(out["logits"][0, 0])
        tokens.append(int(out["tokens"][0, 0]))
    want = theirs(torch.tensor([[*ids, *tokens[:-1]]])).logits[0, len(ids) - 1 :]
    assert (torch.stack(logits) - want).abs().max() < 1e-4
    assert tokens == want.argmax(-1).tolist()


def test_what_is_of_neither_part_is_refused_by_name(tmp_path, theirs):
    write(tmp_path, theirs, **{"language_model.model.layers.1.self_attn.q_bias": torch.zeros(3)})
    model = registry.find(str(tmp_path)).model
    with pytest.raises(CheckpointError, match=r"language_model.model.layers.1.self_attn.q_bias is not part of the model"):
        checkpoint.load(checkpoint.open_checkpoint(tmp_path), model.params(torch.float32))


def test_a_wrapped_file_reads_as_its_text_and_as_deepseek_v3():
    bare = kimi_k2.read_config(TEXT)
    assert bare == kimi_k2.read_config(WRAPPER) == deepseek_v3.read_config({**TEXT, "model_type": "deepseek_v3"})
    assert registry.from_config("it", WRAPPER).family.name == "kimi_k2"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": 45}, "config.json: hidden_size is 45"),
        ({"text_config": {**TEXT, "model_type": "kimi_linear"}}, "model_type is 'kimi_linear'; supported is 'kimi_k2' or 'deepseek_v3'"),
        ({"text_config": {**TEXT, "kv_lora_rank": None}}, "config.json: text_config: kv_lora_rank is missing"),
        ({"mm_gate": 2}, "mm_gate is 2, and nothing here reads it"),
    ],
)
def test_a_malformed_file_is_refused_by_field(change, named):
    with pytest.raises(ConfigError) as error:
        kimi_k2.read_config({**WRAPPER, **change})
    assert named in str(error.value)
