"""Makes `float` and `quantised` beside it: a random model, and what ModelSlim 26.1.0 writes of it. Not run by tests.

    python -m venv MS && MS/bin/pip install torch==2.13.0 'transformers==4.51.0' msmodelslim==26.1.0 sentencepiece
    MS/bin/python make_fixture.py

The model is float32: ModelSlim finds scales in the dtype of the model.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
import string
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Tokenizer, Qwen3MoeConfig
from transformers.models.qwen2.tokenization_qwen2 import bytes_to_unicode

HERE = Path(__file__).parent
CONFIG = Qwen3MoeConfig(
    vocab_size=256,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
    intermediate_size=32,
    moe_intermediate_size=16,
    num_experts=4,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    torch_dtype=torch.float32,
)
TEXT = "".join(random.Random(0).choices(string.printable[:94], k=200))

CHANNEL = {"scope": "per_channel", "dtype": "int8", "symmetric": True, "method": "minmax"}
TOKEN = {"scope": "per_token", "dtype": "int8", "symmetric": True, "method": "minmax"}
TENSOR = {"scope": "per_tensor", "dtype": "int8", "symmetric": False, "method": "minmax"}


def linears(act: dict[str, Any], weight: dict[str, Any], include: str) -> dict[str, Any]:
    """The quantisation of all matrices of a pattern."""
    return {"type": "linear_quant", "qconfig": {"act": act, "weight": weight}, "include": [include]}


PROCESS = [
    linears(TENSOR, CHANNEL, "*self_attn*"),
    linears(TOKEN, {**CHANNEL, "dtype": "int4"}, "*layers.0.mlp.experts*"),
    linears(TOKEN, CHANNEL, "*layers.1.mlp.experts*"),
]


def write_model(directory: Path) -> None:
    """The random model, and a tokenizer of one token a byte; ModelSlim takes tokenizers written in Python only."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG, torch_dtype=torch.float32)
    for parameter in model.parameters():
        wide = parameter.dim() > 1
        torch.nn.init.normal_(parameter, 0.0 if wide else 1.0, parameter.shape[-1] ** -0.5 if wide else 0.2)
    model.save_pretrained(directory)
    (directory / "vocab.json").write_text(json.dumps({letter: i for i, letter in enumerate(bytes_to_unicode().values())}))
    (directory / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = Qwen2Tokenizer(
        str(directory / "vocab.json"), str(directory / "merges.txt"), unk_token="a", pad_token="a", eos_token="a", bos_token="a"
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(directory)


def main() -> None:
    """Writes both directories, and the tokens of the calibration."""
    with tempfile.TemporaryDirectory() as work:
        source, out, recipe, texts = (Path(work, name) for name in ("float", "out", "recipe.yaml", "texts.jsonl"))
        write_model(source)
        texts.write_text(json.dumps({"inputs_pretokenized": TEXT}) + "\n")
        spec = {"process": PROCESS, "save": [{"type": "ascendv1_saver", "part_file_size": 4}], "dataset": str(texts)}
        label = {"w_bit": 8, "a_bit": 8, "is_sparse": False, "kv_cache": False}
        metadata = {"config_id": "fixture", "score": 90, "verified_model_types": ["fixture"], "label": label}
        recipe.write_text(json.dumps({"apiversion": "modelslim_v1", "metadata": metadata, "spec": spec}))  # JSON is YAML
        # ModelSlim refuses files that others may write.
        for path in (source, *source.iterdir(), recipe, texts):
            path.chmod(stat.S_IRWXU)
        out.mkdir(mode=0o700)
        command = [str(Path(sys.executable).parent / "msmodelslim"), "quant", "--model_type", "Qwen3-30B", "--model_path", str(source)]
        command += ["--save_path", str(out), "--device", "cpu", "--config_path", str(recipe), "--trust_remote_code", "False"]
        subprocess.run(command, check=True, cwd=work, env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})
        for directory, name in ((source, "float"), (out, "quantised")):
            shutil.rmtree(HERE / name, ignore_errors=True)
            (HERE / name).mkdir()
            for path in (path for pattern in ("config.json", "*.safetensors", "quant_model_*.json") for path in directory.glob(pattern)):
                shutil.copyfile(path, HERE / name / path.name)
    letters = list(bytes_to_unicode().values())
    (HERE / "tokens.json").write_text(json.dumps([letters.index(letter) for letter in TEXT]) + "\n")


if __name__ == "__main__":
    main()
