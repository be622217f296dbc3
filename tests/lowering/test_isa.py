"""lowering/isa.py: one variable hides what is beyond a level from torch, oneDNN and kernels; what is not there is refused by name."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from npucompile.graphs.errors import SpecError
from npucompile.lowering import isa

FEATURES = [feature for level in isa.LEVELS.values() for feature in level.features]

COMMAND = """
import subprocess, sys, click
from npucompile.tools import cli
with click.Context(cli.main):
    cli.main.callback()
subprocess.run([sys.executable, "-c", *sys.argv[1:]], check=True)
"""
PROCESS = """
import ctypes, sys, torch
from npucompile.lowering import isa
from npucompile.lowering.toolchain import missing_features
print(isa.in_use(), torch.backends.cpu.get_cpu_capability(), torch.ops.mkldnn._is_mkldnn_bf16_supported())
print(ctypes.CDLL(sys.argv[1]).npuc_limit(2), *missing_features(["avx2", "avx512_f", "avx512_vnni"]))
"""


def machine(monkeypatch: pytest.MonkeyPatch, capability: str, lacking: tuple[str, ...] = (), asked: str = "") -> None:
    features = {name: name not in lacking for name in FEATURES}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64", "sse2": True, "avx512_fp16": True, **features})
    monkeypatch.setattr(torch.backends, "cpu", SimpleNamespace(get_cpu_capability=lambda: capability))
    monkeypatch.setattr(isa, "ISA", asked)


@pytest.mark.parametrize("asked", list(isa.LEVELS))
def test_a_level_that_is_asked_for_is_used_and_nothing_beyond_it(monkeypatch, asked):
    machine(monkeypatch, isa.LEVELS[asked].torch.upper(), asked=asked)
    assert isa.in_use() == asked
    upto = list(isa.LEVELS)[: list(isa.LEVELS).index(asked) + 1]
    assert isa.features() == {"sse2", *(feature for name in upto for feature in isa.LEVELS[name].features)}
    assert [isa.has(level) for level in isa.LEVELS] == [level in upto for level in isa.LEVELS]


@pytest.mark.parametrize(
    ("capability", "lacking", "used"),
    [
        ("AVX512", (), "amx"),
        ("AVX512", ("amx_tile",), "avx512_bf16"),
        ("AVX512", ("avx512_bf16",), "avx512"),
        ("AVX2", (), "avx2"),
        ("AVX2", ("avx512_f",), "avx2"),
        ("DEFAULT", ("avx2",), "default"),
        ("NEW", (), None),
    ],
)
def test_without_the_switch_the_most_that_there_is_is_used(monkeypatch, capability, lacking, used):
    machine(monkeypatch, capability, lacking)
    assert isa.in_use() == used
    assert "avx512_fp16" in isa.features()
    assert isa.variables() == {}


def test_a_level_that_is_not_there_is_refused_by_name(monkeypatch):
    machine(monkeypatch, "AVX512", ("amx_tile", "amx_int8"), asked="amx")
    with pytest.raises(
        SpecError, match=r"=amx: this processor lacks amx_int8, amx_tile; legal here are default, avx2, avx512, avx512_bf16$"
    ):
        isa.in_use()
    monkeypatch.setattr(isa, "ISA", "avx9")
    with pytest.raises(SpecError, match=r"NPUCOMPILE_ISA=avx9 is no instruction set; legal are default, avx2, avx512, avx512_bf16, amx"):
        isa.variables()


@pytest.mark.skipif(not isa.has("avx2"), reason="this CPU has no AVX2")
def test_a_command_hides_it_from_torch_onednn_and_kernels_of_the_processes_that_it_starts(kernels):
    library = kernels.library(kernels.LEVELS[0])._name
    environment = {name: value for name, value in os.environ.items() if name not in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")}
    words = [sys.executable, "-c", COMMAND, PROCESS, library]
    run = subprocess.run(words, env={**environment, isa.SWITCH: "avx2"}, capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == ["avx2 AVX2 False", "0 avx512_f avx512_vnni"]


def test_what_code_needs_is_of_a_level():
    assert [isa.level_of(level.features) for level in isa.LEVELS.values()] == list(isa.LEVELS)
    assert isa.level_of(("avx2", "amx_tile", "unknown")) == "amx"
    assert isa.level_of(("sse4_2",)) == "default"
