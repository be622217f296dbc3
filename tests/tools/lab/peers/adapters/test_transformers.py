from __future__ import annotations

import json
from pathlib import Path

import torch
from support import tiny
from transformers import AutoModelForCausalLM

from npucompile.tools.bench.streams import StreamLoad
from npucompile.tools.lab.peers.adapters.transformers import open_engine
from npucompile.tools.lab.peers.loop import ArrivalTimes

PROMPTS = StreamLoad(2, 6, 8).prompts(tiny.VOCAB)


def served(checkpoint: Path) -> tuple[list[list[int]], tuple[float, ...]]:
    """Tokens and times of an engine whose clock ticks at every token."""
    engine, now = open_engine(), iter(range(1000))
    engine.load(str(checkpoint), "f32", torch.get_num_threads(), 14, 2)
    watch = ArrivalTimes(2, lambda: float(next(now)))
    engine.generate(PROMPTS, 8, watch)
    report = watch.report(8)
    return report["token_ids"], (report["prefill_s"], report["decode_s"], report["decoded"])


def test_every_token_arrives_after_a_step_of_its_own_and_the_end_of_text_is_ignored(tiny_checkpoint: Path, tmp_path: Path) -> None:
    tokens, times = served(tiny_checkpoint)
    # The first two ticks are the prompts'.
    assert times == (2.0, 14.0, 14)
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + row for prompt, row in zip(PROMPTS, tokens, strict=True)])).logits
    assert logits[:, 5:-1].argmax(-1).tolist() == tokens
    ends = tiny.copied(tiny_checkpoint, tmp_path / "ends")
    config = json.loads((ends / "config.json").read_text())
    (ends / "config.json").write_text(json.dumps(config | {"eos_token_id": tokens[0][2]}))
    assert served(ends)[0] == tokens
