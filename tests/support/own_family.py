"""The files that docs/your-own-family.md shows: a family outside the repository, and the scripts around it."""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
from collections.abc import Mapping
from pathlib import Path

import torch
from support.texts import byte_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs/your-own-family.md").read_text(encoding="utf-8")
FILES: Mapping[str, str] = dict(re.findall(r"^```python (\S+)\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL))
"""Name of a file -> its text."""
FAMILY = FILES["qwen2.py"]


def run(script: Path) -> str:
    """What a script prints; it runs in this process, where transformers can be imported."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue()


def write(directory: Path, family: str = FAMILY) -> tuple[Path, Path]:
    """A random checkpoint of one narrow layer, and the family's file."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, vocab_size=260, max_position_embeddings=128, initializer_range=0.3, eos_token_id=256))
    for name, tensor in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(tensor)
    model.save_pretrained(directory / "small")
    byte_tokenizer().save(str(directory / "small" / "tokenizer.json"))
    file = directory / "own.py"
    file.write_text(family, encoding="utf-8")
    return directory / "small", file


def changed(checkpoint: Path, **fields: object) -> None:
    """Changes fields of a checkpoint's config.json."""
    file = checkpoint / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
