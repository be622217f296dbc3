from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import tiny
from support.tiny import QUIET

from npucompile.graphs.errors import ModelError, SpecError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.tools.bench.streams import StreamLoad
from npucompile.tools.lab.peers.engines import PEERS, EnginePeer
from npucompile.tools.lab.peers.process import PeerError
from npucompile.tools.lab.peers.run import PeerChoice, checkpoint_dir, choice, convert, find, peer_side, peers

FAKE = """
import sys, time

class Engine:
    version = "9.9"

    def load(self, model, dtype, threads, max_model_len, max_num_seqs):
        if {refuses!r} and {refuses!r} in open(model + "/config.json").read():
            raise ValueError("does not know this model")
        self.most = {most}
        return "one by one"

    def generate(self, prompts, tokens, emit):
        if len(prompts) > self.most:
            raise MemoryError("no room")
        for _ in range(tokens):
            time.sleep(0.002)
            for i, _ in enumerate(prompts):
                emit(i, [1])

def open_engine():
    return Engine()
"""


def fake(directory: Path, name: str, refuses: str = "", most: int = 99, **fields: Any) -> EnginePeer:
    """An engine that is a real process."""
    adapter = directory / f"{name}.py"
    adapter.write_text(FAKE.format(refuses=refuses, most=most))
    return EnginePeer(name, str(adapter), "pip install it", **fields)


def test_the_tables_have_every_side_or_its_reason(tiny_artifact: Path, tmp_path: Path) -> None:
    artifact = Artifact.open(tiny_artifact)
    chosen = PeerChoice((fake(tmp_path, "good", most=1), fake(tmp_path, "strict", "qwen3_5_moe_text"), PEERS["vllm"], PEERS["llama.cpp"]))
    throughput, start = peers(
        artifact,
        chosen,
        [StreamLoad(1, 6, 8), StreamLoad(3, 6, 8)],
        1,
        threads=1,
        cache=tmp_path / "cache",
        environment={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        progress=QUIET,
    )
    measured = [(line["streams"], line["prompts"], line["engine"]) for line in throughput.rows]
    assert measured == [(1, "6", "npucompile"), (1, "6", "good"), (3, "6", "npucompile"), (3, "1 to 12", "npucompile")]
    assert all(line["prefill_tok_s"] > 0 and line["decode_tok_s"] > 0 for line in throughput.rows)
    assert "good failed at 3 streams: MemoryError: no room" in throughput.notes
    remarks = {str(line["engine"]): str(line["remark"]) for line in start.rows}
    assert remarks["good"] == "9.9, one by one, f32"
    assert remarks["strict"] == "ValueError: does not know this model"
    assert remarks["npucompile"].endswith("eager, 3 drafts")
    assert "No module named 'vllm'" in remarks["vllm"]
    assert "name an interpreter that has it with --peer-python vllm=PATH" in remarks["vllm"]
    assert "--peer-python llama.cpp=PATH" in remarks["llama.cpp"]
    assert [line["engine"] for line in start.rows if line.get("load_s")] == ["npucompile", "good"]


def test_a_side_of_ours_that_fails_fails_the_figure(tiny_artifact: Path, tmp_path: Path) -> None:
    artifact = Artifact.open(tiny_artifact)
    with pytest.raises(SpecError, match="context of 64"):
        peers(artifact, PeerChoice(()), [StreamLoad(1, 60, 8)], 1, threads=1, cache=tmp_path, environment=os.environ, progress=QUIET)
    gone = Artifact(tiny.copied(tiny_artifact, tmp_path / "gone"), artifact.manifest, artifact.digest)
    (gone.path / str(artifact.manifest.weights)).unlink()
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    with pytest.raises(PeerError, match=r"ArtifactTampered: .* is missing"):
        peers(gone, PeerChoice(()), [StreamLoad(1, 6, 8)], 1, threads=1, cache=tmp_path, environment=environment, progress=QUIET)


def test_a_checkpoint_is_converted_once(tiny_artifact: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    manifest = Artifact.open(tiny_artifact).manifest
    peer = fake(tmp_path, "llama.cpp", weights={"f32": "f32"})
    commands = []

    def run(command: Any, variables: Any) -> None:
        commands.append(command)
        Path(command[5]).write_text("GGUF")

    chosen = PeerChoice((peer,), {"llama.cpp": sys.executable}, tmp_path)
    for _ in range(2):
        side = peer_side(peer, chosen, tiny_checkpoint, manifest, 1, tmp_path / "cache", os.environ, QUIET, run)
        assert Path(side.model).read_text() == "GGUF"
        assert side.remark == "f32 weights"
    assert len(commands) == 1
    assert commands[0][4] == str(tiny_checkpoint)
    with pytest.raises(PeerError, match=r"llama.cpp has no weights like bf16; legal are f32"):
        peer_side(peer, chosen, tiny_checkpoint, replace(manifest, dtype="bf16"), 1, tmp_path / "cache", os.environ, QUIET, run)
    with pytest.raises(PeerError, match="with --llama-cpp DIR"):
        peer_side(peer, replace(chosen, llama_cpp=None), tiny_checkpoint, manifest, 1, tmp_path / "other", os.environ, QUIET, run)


def test_a_checkpoint_that_changed_or_went_is_not_compared(tiny_artifact: Path, tiny_checkpoint: Path, tmp_path: Path) -> None:
    manifest = Artifact.open(tiny_artifact).manifest
    assert checkpoint_dir(manifest).samefile(tiny_checkpoint)
    other = tiny.write_checkpoint(tmp_path / "other", seed=1)
    with pytest.raises(ModelError, match=f"{other} has digest .* built from {manifest.source_digest}"):
        checkpoint_dir(replace(manifest, build_arguments=(str(other),)))
    with pytest.raises(ModelError, match="'tiny' at gone, and no checkpoint is there"):
        checkpoint_dir(replace(manifest, build_arguments=("gone",)))


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def command(out: Path) -> list[str]:
        code = f"import os, sys; os.mkdir({str(out)!r}); print('warning\\nKeyError: qwen9', file=sys.stderr); sys.exit(4)"
        return [sys.executable, "-c", code]

    with pytest.raises(PeerError, match="its converter ended with status 4: KeyError: qwen9"):
        convert(command, tmp_path / "cache" / "model", os.environ)
    assert list((tmp_path / "cache").iterdir()) == []
    with pytest.raises(PeerError, match="its converter wrote nothing"):
        convert(lambda out: [sys.executable, "-c", ""], tmp_path / "cache" / "model", os.environ)


def test_the_named_interpreter_is_the_only_one_asked(tmp_path: Path) -> None:
    peer = fake(tmp_path, "good")
    assert find(peer, {}, os.environ, tmp_path) == sys.executable
    with pytest.raises(PeerError, match=f"{tmp_path}/python cannot be started"):
        find(peer, {"good": f"{tmp_path}/python"}, os.environ, tmp_path)


def test_the_options_are_read(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"has no convert_hf_to_gguf.py; legal is a checkout of llama.cpp"):
        choice((), (), tmp_path)
    (tmp_path / "convert_hf_to_gguf.py").touch()
    chosen = choice(("vllm",), (f"vllm={sys.executable}",), tmp_path)
    assert chosen == PeerChoice((PEERS["vllm"],), {"vllm": sys.executable}, tmp_path)
