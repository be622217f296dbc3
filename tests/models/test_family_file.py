"""models/family_file.py: a family outside the package is loaded and refused by line and field, and is found again by other processes."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys

import pytest
import torch
from support import own_family

from npucompile.graphs.errors import ConfigError, FamilyError, UnknownModel
from npucompile.models import registry
from npucompile.models.family_file import FamilyFile

END = "FAMILY = Family("


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return own_family.write(tmp_path_factory.mktemp("own"))


def refused(directory, text):
    """The error of a family of that text."""
    file = directory / "own.py"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(FamilyError) as error:
        registry.own_family(FamilyFile.read(file))
    assert str(file) in str(error.value)
    return str(error.value)


def test_a_file_gives_a_family_and_its_checkpoint_a_model(written):
    checkpoint, path = written
    file = FamilyFile.read(path)
    source = registry.find(checkpoint, file)
    assert source.model.family is registry.own_family(file) is file.load()
    assert source.model.params(torch.float32)["layers"][0]["mixer"]["qkv"]["bias"].aval.shape == (64,)
    assert FamilyFile.recorded({"family_file": file.as_fields()}) == file
    assert FamilyFile.recorded({}) is None
    assert registry.from_config(source.name, json.loads(source.text), family=file) == source.model


def test_another_process_finds_functions_and_configurations(written):
    """As a pool does, which loads the file before it unpickles anything; the file itself may be gone."""
    checkpoint, path = written
    file = FamilyFile.read(path)
    packed = pickle.dumps(file), pickle.dumps(registry.find(checkpoint, file))
    moved = path.rename(path.with_name("moved"))
    try:
        code = f"""
import pickle
from npucompile.tools.builder.pool import _prepare
_prepare((pickle.loads({packed[0]!r}),))
source = pickle.loads({packed[1]!r})
print(source.model.family.name, source.model.config.hidden_size)
"""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    finally:
        moved.rename(path)
    assert done.stdout == "qwen2 32\n", done.stderr


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (END, "RECORD = Family(", "defines no FAMILY; expected FAMILY = Family(...)"),
        (END, "FAMILY = dict(", "FAMILY is a dict; expected FAMILY = Family(...)"),
        ("    shrink=shrink,\n", "", "TypeError: Family.__init__() missing 1 required positional argument: 'shrink'"),
        ("    forward=forward,", "    forward=None,", "FAMILY.forward is None; expected a function"),
        (
            "    head=decoder.head,",
            "    head=lambda cfg, params, x: x,",
            "FAMILY.head is '<lambda>'; expected a function that is defined at the top",
        ),
        ('name="qwen2"', "name=2", "FAMILY.name is 2; expected a name"),
        ('model_types=("qwen2",)', 'model_types="qwen2"', "FAMILY.model_types is 'qwen2'; expected a tuple"),
        ("widths=sizes.WIDTHS", "widths=3", "FAMILY.widths is 3; expected a mapping"),
        ("widths=sizes.WIDTHS", "widths=sizes.WIDTHS, draft_head=3", "FAMILY.draft_head is 3; expected a DraftHead, or None"),
        ('name="qwen2"', 'name="qwen3"', "FAMILY.name is 'qwen3', a family of npucompile; legal is any but deepseek_v3,"),
        (END, "FAMILY = Fmily(", "line {line}: FAMILY = Fmily(\n  NameError: name 'Fmily' is not defined"),
        (END, "FAMILY = = Family(", "line {line}: FAMILY = = Family(\n  SyntaxError: invalid syntax"),
        (
            "import torch\n",
            "import torch\nimport transformers\n",
            "imports transformers; legal are the standard library, npucompile, torch",
        ),
        ("import torch\n", "import torch\nfrom .other import x\n", "imports .other; legal are"),
        ("import attention,", "import atention,", "ImportError: cannot import name 'atention'"),
    ],
)
def test_what_is_wrong_is_said_with_its_line_or_field(tmp_path, old, new, message):
    assert own_family.FAMILY.count(old) == 1
    text = own_family.FAMILY.replace(old, new)
    line = next((i for i, each in enumerate(text.splitlines(), 1) if each.startswith(new.strip())), 0)
    assert message.format(line=line) in refused(tmp_path, text)


@pytest.mark.parametrize(
    ("old", "new", "kind", "message"),
    [
        (
            'fields.only("hidden_act", "silu")',
            'fields.onli("hidden_act", "silu")',
            FamilyError,
            "AttributeError: 'Fields' object has no attribute",
        ),
        (
            "    variant: Variant = PLAIN",
            "    variant = PLAIN",
            FamilyError,
            "Config has no field variant; expected `variant: Variant = PLAIN`",
        ),
        ("def split_heads(", "def splitted(", FamilyError, "Config lacks split_heads; a configuration has hidden_size, layer_kinds"),
        ("@dataclass(frozen=True)", "@dataclass", FamilyError, "read_config returned a Config; expected a frozen dataclass"),
        ("    norm_offset = 0.0\n", "", FamilyError, "AttributeError: 'Config' object has no attribute 'norm_offset'"),
        ('model_types=("qwen2",)', 'model_types=("qwen2_vl",)', UnknownModel, "model_type 'qwen2' is not served by the family qwen2 of"),
        ('"hidden_act", "silu"', '"hidden_act", "gelu"', ConfigError, "config.json: hidden_act is 'silu'; supported is 'gelu'"),
    ],
)
def test_what_goes_wrong_with_a_checkpoint_is_said_too(written, tmp_path, old, new, kind, message):
    file = tmp_path / "own.py"
    file.write_text(own_family.FAMILY.replace(old, new), encoding="utf-8")
    with pytest.raises(kind) as error:
        registry.find(written[0], FamilyFile.read(file))
    assert message in str(error.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(FamilyError, match=r"no\.py does not exist; legal is a Python file"):
        FamilyFile.read(tmp_path / "no.py")
    with pytest.raises(FamilyError, match="is a directory; legal is a Python file"):
        FamilyFile.read(tmp_path)
    (tmp_path / "own.py").write_bytes(b"\xff\xfe")
    with pytest.raises(FamilyError, match=r"own\.py: cannot be read as UTF-8 text"):
        FamilyFile.read(tmp_path / "own.py")
