from __future__ import annotations

from pathlib import Path

import torch
from support import tiny

from npucompile.tools.bench.streams import Load
from npucompile.tools.lab.peer import transformers_generate
from npucompile.tools.lab.peers.adapters.transformers import open_engine
from npucompile.tools.lab.peers.loop import Watch


def test_every_token_arrives_after_a_step_of_its_own(tiny_checkpoint: Path) -> None:
    prompts = Load(2, 6, 8).prompts(tiny.VOCAB)
    engine = open_engine()
    engine.load(str(tiny_checkpoint), "f32", torch.get_num_threads(), 14, 2)
    now = iter(range(1000))
    watch = Watch(2, lambda: float(next(now)))
    report = watch.report(8, engine.generate(prompts, 8, watch))
    assert [tuple(row) for row in report["token_ids"]] == transformers_generate(tiny_checkpoint, torch.float32)(prompts, 8)
    # The clock ticks at every token: the first two are the prompt's.
    assert (report["prefill_s"], report["decode_s"], report["decoded"], report["steps"]) == (2.0, 14.0, 14, 7)
