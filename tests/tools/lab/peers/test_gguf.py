from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from npucompile.tools.lab.peers import gguf

CLASSES = """
class ModelBase:
    no_mtp = False

class TextModel(ModelBase):
    def get_vocab_base_pre(self, tokenizer):
        raise NotImplementedError("unknown pre-tokenizer")
"""
MAIN = """
import sys

def main():
    model = TextModel()
    open(sys.argv[3], "w").write(f"{sys.argv[1:]} {model.get_vocab_base_pre(None)} {model.no_mtp}")
"""


@pytest.mark.parametrize("layout", ["one file", "a package"])
def test_a_checkouts_converter_is_run_without_its_pretokenizers_and_drafts(tmp_path: Path, layout: str) -> None:
    if layout == "one file":
        (tmp_path / "convert_hf_to_gguf.py").write_text(CLASSES + MAIN)
    else:
        (tmp_path / "conversion").mkdir()
        (tmp_path / "conversion" / "__init__.py").write_text("from .base import ModelBase, TextModel\n")
        (tmp_path / "conversion" / "base.py").write_text(CLASSES)
        (tmp_path / "convert_hf_to_gguf.py").write_text("from conversion import TextModel\n" + MAIN)
    out = tmp_path / "out.gguf"
    command = [sys.executable, "-I", gguf.__file__, str(tmp_path), "checkpoint", str(out), "bf16"]
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert out.read_text() == f"{['checkpoint', '--outfile', str(out), '--outtype', 'bf16']} {gguf.PRE_TOKENIZER} True"
