"""tools/serve/artifact_tokenizer.py: which tokenizer it is, and that nothing of a server is loaded for it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.tools.serve.artifact_tokenizer import TOKENIZER, tokenizer_of


def test_an_artifact_has_its_own_or_that_of_a_checkpoint_or_none(tiny_artifact: Path, tmp_path: Path) -> None:
    artifact = Artifact.open(tiny_artifact)
    own = tokenizer_of(artifact)
    without: Any = SimpleNamespace(path=artifact.path, manifest=replace(artifact.manifest, tokenizer=None))
    assert own is not None
    assert tokenizer_of(without) is None
    assert tokenizer_of(without, tmp_path) is None
    (tmp_path / TOKENIZER).write_bytes((artifact.path / str(artifact.manifest.tokenizer)).read_bytes())
    other = tokenizer_of(without, tmp_path)
    assert other is not None
    assert other.encode("light") == own.encode("light")


def test_generate_loads_no_server() -> None:
    program = "import sys, npucompile.tools.commands.generate; print([n for n in sys.modules if n in ('pydantic', 'starlette', 'uvicorn')])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "[]"
