from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from npucompile.graphs.errors import SpecError
from npucompile.tools.lab.peers import engines
from npucompile.tools.lab.peers.engines import PEERS, candidates, conversion, interpreters, named


def test_every_engine_has_an_adapter() -> None:
    files = {path.name for path in (engines.HERE / "adapters").glob("*.py")} - {"__init__.py"}
    assert {peer.adapter for peer in PEERS.values()} == files


def test_peers_are_named_once_each() -> None:
    assert [peer.name for peer in named(("vllm", "llama.cpp", "vllm"))] == ["vllm", "llama.cpp"]
    assert tuple(peer.name for peer in named(())) == engines.DEFAULT
    with pytest.raises(SpecError, match=r"--peer 'sglang' is unknown; legal are llama.cpp, openvino, vllm, transformers"):
        named(("sglang",))


def test_interpreters_are_read_and_must_be_there(tmp_path: Path) -> None:
    assert interpreters((f"llama.cpp={sys.executable}",)) == {"llama.cpp": sys.executable}
    for word in ("vllm", "tgi=python3", "=python3", "llama.cpp-q8_0=python3"):
        with pytest.raises(
            SpecError, match=f"--peer-python is {re.escape(repr(word))}; legal is NAME=PATH, where NAME is one of llama.cpp, "
        ):
            interpreters((word,))
    with pytest.raises(SpecError, match=f"--peer-python vllm names {tmp_path}/python, where there is no interpreter"):
        interpreters((f"vllm={tmp_path}/python",))


def test_a_variant_shares_its_engines_interpreter_and_others_are_looked_for(tmp_path: Path) -> None:
    assert candidates(PEERS["llama.cpp-q8_0"], {"llama.cpp": "here"}, None, tmp_path) == ("here",)
    other = tmp_path / "python3"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    assert candidates(PEERS["vllm"], {"llama.cpp": "here"}, str(tmp_path), tmp_path) == (sys.executable, str(other))
    own = tmp_path / "vllm" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.symlink_to(sys.executable)
    assert candidates(PEERS["vllm"], {}, str(tmp_path), tmp_path) == (str(own),)


def test_threads_are_cores_too() -> None:
    cores = sorted(os.sched_getaffinity(0))
    environment = PEERS["vllm"].environment({"A": "b", "OMP_NUM_THREADS": "7"}, 1)
    assert (environment["A"], environment["OMP_NUM_THREADS"], environment["VLLM_CPU_OMP_THREADS_BIND"]) == ("b", "1", str(cores[0]))


def test_weights_are_converted_to_what_the_artifact_computes_in() -> None:
    assert [peer.format_of("bf16") for peer in PEERS.values()] == ["bf16", "fp16", None, None, "q8_0", "int8"]
    with pytest.raises(SpecError, match=r"openvino has no weights like f16; legal are bf16, f32"):
        PEERS["openvino"].format_of("f16")


def test_converters_are_what_their_projects_ship(tmp_path: Path) -> None:
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out"
    command = conversion(PEERS["openvino"], "python", checkpoint, out, "fp16", None)
    assert command[1:5] == ["-m", "optimum.commands.optimum_cli", "export", "openvino"]
    assert command[-1] == str(out)
    assert conversion(PEERS["llama.cpp"], "python", checkpoint, out, "bf16", tmp_path)[3:] == [
        str(tmp_path), str(checkpoint), str(out), "bf16",
    ]  # fmt: skip
    with pytest.raises(SpecError, match=r"llama.cpp reads GGUF files: name a checkout .* with --llama-cpp DIR"):
        conversion(PEERS["llama.cpp"], "python", checkpoint, out, "bf16", None)
