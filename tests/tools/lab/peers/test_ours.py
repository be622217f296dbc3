from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from support import tiny

from npucompile.lowering.artifact.artifact import Artifact
from npucompile.tools.bench.streams import StreamLoad
from npucompile.tools.lab.peers.adapters.transformers import open_engine
from npucompile.tools.lab.peers.loop import ArrivalTimes
from npucompile.tools.lab.peers.process import PeerError
from npucompile.tools.lab.peers.run import our_side


def test_a_process_of_ours_says_what_transformers_says(tiny_artifact: Path, tiny_checkpoint: Path) -> None:
    prompts = StreamLoad(3, 6, 8).prompts(tiny.VOCAB)
    transformers, watch = open_engine(), ArrivalTimes(3)
    transformers.load(str(tiny_checkpoint), "f32", torch.get_num_threads(), 14, 3)
    transformers.generate(prompts, 8, watch)
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    with our_side("ours", Artifact.open(tiny_artifact), 1, environment).open() as process:
        with pytest.raises(PeerError, match="is not an artifact"):
            process.ask("load", model="/nowhere", dtype="f32", threads=1, max_model_len=14, max_num_seqs=3)
        loaded = process.ask("load", model=str(tiny_artifact), dtype="f32", threads=1, max_model_len=14, max_num_seqs=3)
        assert loaded == {"loaded": "eager, 3 drafts"}
        assert process.ask("settle") == {}
        reply = process.ask("generate", prompts=prompts, tokens=8)
    assert reply["token_ids"] == watch.report(8)["token_ids"]
