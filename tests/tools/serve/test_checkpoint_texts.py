"""tools/serve/checkpoint_texts.py: whose tokenizer, ends and template they are, and that nothing of a server is loaded for them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from support.kimi_texts import write_tokenizer

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.models import registry
from npucompile.models.end_tokens import TOKENIZER
from npucompile.models.presets import BUNDLED
from npucompile.tools.serve.api_settings import ApiSettings
from npucompile.tools.serve.artifact_tokenizer import tokenizer_of
from npucompile.tools.serve.checkpoint_texts import replaced, with_texts_of


def test_an_artifact_has_its_own_tokenizer_or_that_of_a_checkpoint_or_none(tiny_artifact: Path, tmp_path: Path) -> None:
    artifact = Artifact.open(tiny_artifact)
    own = tokenizer_of(artifact)
    without = replaced(artifact, tokenizer=None)
    assert own is not None
    assert tokenizer_of(without) is None
    assert tokenizer_of(with_texts_of(without, tmp_path)) is None
    (tmp_path / TOKENIZER).write_bytes((artifact.path / str(artifact.manifest.tokenizer)).read_bytes())
    other = tokenizer_of(with_texts_of(without, tmp_path))
    assert other is not None
    assert other.encode("light") == own.encode("light")
    kimi = write_tokenizer(tmp_path / "kimi", 300)
    converted = tokenizer_of(with_texts_of(without, tmp_path / "kimi"))
    assert converted is not None
    assert list(converted.encode("你好 light")) == kimi.encode("你好 light")


def test_an_artifact_of_sizes_alone_has_the_ends_and_the_template_of_its_checkpoint(tiny_artifact: Path, tmp_path: Path) -> None:
    """As one of a preset, which `import` proposes: its answers had no end, and its chats no template."""
    artifact, bundled = Artifact.open(tiny_artifact), registry.find(BUNDLED[0])
    assert bundled.checkpoint_dir is not None
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(bundled.checkpoint_dir, checkpoint)
    (checkpoint / "chat_template.jinja").write_text("{{ eos_token }}!")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "eos_token_id": [3, config["vocab_size"]]}))
    (checkpoint / "generation_config.json").write_text('{"temperature": 0.25}')
    model = {**artifact.manifest.model, "eos_ids": [], "special_tokens": {}, "sampling": {}}
    sizes = replaced(artifact, source_digest="none", tokenizer=None, chat_template=None, model=model)
    served = with_texts_of(sizes, checkpoint)
    assert 3 in served.manifest.model["eos_ids"]
    assert config["vocab_size"] not in served.manifest.model["eos_ids"]
    assert ApiSettings().defaults_of(served) == {"temperature": 0.25}
    template = ApiSettings().chat_of(served).template
    assert template is not None
    assert template.text == "{{ eos_token }}!"
    assert served.manifest.model["special_tokens"]["eos_token"] == bundled.special_tokens["eos_token"]
    assert tokenizer_of(served) is not None
    # One that was built of a checkpoint has what it had.
    assert with_texts_of(artifact, checkpoint) is artifact


def test_generate_loads_no_server() -> None:
    program = "import sys, npucompile.tools.commands.generate; print([n for n in sys.modules if n in ('pydantic', 'starlette', 'uvicorn')])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "[]"
