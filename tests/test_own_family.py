"""docs/your-own-family.md, literally: its files and its commands, in an empty directory outside the repository."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from support import documents, own_family, servers, tiny
from transformers import AutoModelForCausalLM

from npucompile.models import registry
from npucompile.models.family_file import FamilyFile
from npucompile.tools.quantize import forward

SERVE = "npucompile serve small"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The directory after all commands of the document, each of which printed what it says."""
    cwd = tmp_path_factory.mktemp("elsewhere")
    for name, text in own_family.FILES.items():
        (cwd / name).write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        for command, printed in documents.shown(own_family.DOCUMENT):
            assert list(documents.wrong_output(printed, output_of(command, cwd))) == [], command
    return cwd


def output_of(command: str, cwd: Path) -> list[str]:
    """Lines that a command prints; one for this CPU is built uncompiled, which takes seconds."""
    call, _, target = command.partition(" > ")
    program, *arguments = shlex.split(call)
    if program == "python":
        return own_family.run(cwd / arguments[0]).splitlines()
    assert program == "npucompile", command
    if arguments[0] == "build" and "--target" not in arguments:
        arguments += ["--backend", "eager"]
    result = tiny.cli(cwd, *arguments)
    assert result.exit_code == 0, result.output
    if target:
        (cwd / target).write_text(result.stdout, encoding="utf-8")
    return [] if target else result.stdout.splitlines()


@pytest.mark.long
def test_the_documents_commands_do_what_it_says(place):
    """Prefill in chunks and decoding give the tokens of transformers (compare.py); the artifacts for ranks and NPUs are verified."""
    assert len(json.loads((place / "ours.json").read_text())["token_ids"]) == 64


@pytest.mark.long
@torch.no_grad()
@pytest.mark.parametrize("name", ["small", "small-w8a8"])
def test_logits_are_those_of_transformers(place, name):
    """Of all positions at once; int8 weights and activations add their rounding, and a bias that they forgot would add far more."""
    source = registry.find(place / name, FamilyFile.read(place / "qwen2.py"))
    model, params = forward.loaded(source, torch.float32)
    tokens = torch.randint(0, 260, (3, 40), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    ours = forward.logits(model, params, tokens, torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(place / "small", dtype=torch.float32)(tokens.long()).logits
    if name == "small":
        assert (ours - theirs).abs().max() < 1e-4
    else:
        assert (ours - theirs).norm() < 0.2 * theirs.norm()


@pytest.mark.long
def test_an_artifact_is_served_without_the_family_file(place):
    assert re.search(rf"^    {SERVE}$", own_family.DOCUMENT, re.MULTILINE)
    file = place / "qwen2.py"
    hidden = file.rename(place / "elsewhere")
    try:
        server = servers.Server(place / "artifacts" / "small", "--no-build", home=place)
        try:
            want = json.loads(
                tiny.cli(place, "generate", "small", "--token-ids", "7,8,9", "--max-tokens", 5, "--ignore-eos", "--json").stdout
            )
            assert list(asyncio.run(server.ask(5))) == want["token_ids"]
        finally:
            server.close()
        assert tiny.cli(place, "verify", place / "small-tp2").exit_code == 0
    finally:
        hidden.rename(file)


def test_the_file_is_short_and_uses_public_modules_only():
    assert len(own_family.FAMILY.splitlines()) < 120
    public = set(re.findall(r"`(npucompile(?:\.\w+)+)`", own_family.DOCUMENT.partition("## The family")[0]))
    for node in ast.walk(ast.parse(own_family.FAMILY)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("npucompile"):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            assert node.module in public or inner <= public, node.module
