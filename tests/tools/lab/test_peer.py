from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import tiny

from npucompile.graphs.errors import ModelError, SpecError
from npucompile.lowering.artifact.artifact import Artifact
from npucompile.tools.bench.streams import Load
from npucompile.tools.lab import peer as bench_peer
from npucompile.tools.lab.peer import Served, checkpoint_dir, first_difference, peer, row, said, serve_peer, transformers_generate
from npucompile.tools.progress import Progress

QUIET = Progress(quiet=True)
TOKENS = st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1, max_size=5)


@given(TOKENS, st.data())
def test_the_first_difference_is_where_a_token_was_changed(ours: list[list[int]], data: st.DataObject) -> None:
    assert first_difference(ours, ours) == (len(ours), None)
    changed = data.draw(st.dictionaries(st.integers(0, len(ours) - 1), st.integers(0, 4), min_size=1))
    theirs = [[token + (i >= changed.get(n, 9)) for i, token in enumerate(row)] for n, row in enumerate(ours)]
    assert first_difference(ours, theirs) == (len(ours) - len(changed), min(changed.values()))


def test_a_stream_that_is_too_short_differs_at_its_end() -> None:
    assert first_difference([(1, 2, 3)], [(1, 2)]) == (0, 2)


def test_both_sides_of_a_round_make_its_ratio_and_its_verdict() -> None:
    same, other = ((1, 2), (3, 4)), ((1, 2), (3, 5))
    cells = row(Load(2, 4, 2), [Served(20.0, same), Served(60.0, same)], [Served(10.0, same), Served(20.0, same)])
    assert cells["ours_over_peer"].low == 2.0  # type: ignore[union-attr]
    assert cells["ours_over_peer"].high == 3.0  # type: ignore[union-attr]
    assert (cells["equal"], cells["first_difference"]) == ("2 of 2", None)
    assert said([cells], "f32") == "greedy tokens are identical, on all streams and in all rounds"
    differing = row(Load(2, 4, 2), [Served(20.0, same), Served(60.0, same)], [Served(10.0, same), Served(20.0, other)])
    assert (differing["equal"], differing["first_difference"]) == ("1 of 2", 1)
    assert said([cells, differing], "f32").startswith("GREEDY TOKENS DIFFER")
    assert "float32" in said([differing], "bf16")


def test_the_peer_is_timed_over_one_batch_of_the_same_prompts() -> None:
    now = [0.0]
    calls: list[tuple[Sequence[Sequence[int]], int]] = []

    def generate(prompts: Sequence[Sequence[int]], tokens: int) -> list[tuple[int, ...]]:
        calls.append((prompts, tokens))
        now[0] += 4.0
        return [(7,) * tokens for _ in prompts]

    load = Load(3, 5, 8)
    served = serve_peer(generate, load, 50, lambda: now[0])
    assert served == Served(3 * 8 / 4.0, ((7,) * 8,) * 3)
    assert calls == [(load.prompts(50), 8)]


def test_the_checkpoint_of_an_artifact_is_found_by_its_path(tiny_artifact: Path, tiny_checkpoint: Path) -> None:
    assert checkpoint_dir(Artifact.open(tiny_artifact).manifest).samefile(tiny_checkpoint)


def test_a_checkpoint_that_changed_or_went_is_no_peer(tiny_artifact: Path, tmp_path: Path) -> None:
    manifest = Artifact.open(tiny_artifact).manifest
    other = tiny.write_checkpoint(tmp_path / "other", seed=1)
    with pytest.raises(ModelError, match=f"{other} has digest .* built from {manifest.source_digest}"):
        checkpoint_dir(replace(manifest, build_arguments=(str(other),)))
    with pytest.raises(ModelError, match="'tiny' at gone, and no checkpoint is there"):
        checkpoint_dir(replace(manifest, build_arguments=("gone",)))


def test_the_peer_says_the_same_tokens(tiny_artifact: Path) -> None:
    table = peer(Artifact.open(tiny_artifact), [Load(1, 6, 8), Load(3, 6, 8)], 1, QUIET)
    assert [(line["streams"], line["equal"], line["first_difference"]) for line in table.rows] == [(1, "1 of 1", None), (3, "3 of 3", None)]
    assert table.notes[0].startswith("greedy tokens are identical")


def test_the_peer_does_not_stop_at_the_end_of_text(tiny_checkpoint: Path, tmp_path: Path) -> None:
    prompts = Load(2, 6, 8).prompts(tiny.VOCAB)
    expected = transformers_generate(tiny_checkpoint, torch.float32)(prompts, 8)
    assert [len(row) for row in expected] == [8, 8]
    ends = tiny.copied(tiny_checkpoint, tmp_path / "ends")
    config = json.loads((ends / "config.json").read_text())
    (ends / "config.json").write_text(json.dumps(config | {"eos_token_id": expected[0][2]}))
    assert transformers_generate(ends, torch.float32)(prompts, 8) == expected


def test_torch_npu_without_cann_is_not_asked_for(tmp_path: Path) -> None:
    """Installed, and failing when it is imported: in a process of its own, since tests hide it from transformers themselves."""
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')\n")
    imports = "from transformers.utils import is_torch_npu_available; import transformers.modeling_flash_attention_utils"
    code = f"from npucompile.tools.lab import peer as bench_peer; bench_peer._library(); {imports}; assert not is_torch_npu_available()"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


def test_without_transformers_it_says_what_to_install(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_peer, "installed", lambda: False)
    with pytest.raises(SpecError, match=r"transformers, which is not installed.*\.\[test\]"):
        peer(Artifact.open(tiny_artifact), [Load(1, 6, 8)], 1, QUIET)


def test_a_load_beyond_the_context_is_refused_before_anything_is_loaded(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_peer, "transformers_generate", None)
    with pytest.raises(SpecError, match="context of 64"):
        peer(Artifact.open(tiny_artifact), [Load(1, 6, 8), Load(1, 60, 8)], 1, QUIET)
