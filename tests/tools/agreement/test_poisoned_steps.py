"""tools/agreement/poisoned_steps.py: what a live row may not read is NaN, and a run of a step changes nothing else."""

from __future__ import annotations

from dataclasses import replace

import torch
from support.residency import resident_bytes
from support.toy_step import DRAFTING, VOCAB, Toy

from npucompile.graphs.types import Bucket
from npucompile.tools.agreement.poisoned_steps import ProvedStep, poisoned_step, run_step


def test_pools_after_a_step_take_memory_only_where_it_wrote() -> None:
    toy = Toy(Bucket("decode", 1, 3), replace(DRAFTING, num_pages=2**20))
    step = ProvedStep(toy.bucket, toy.signature, toy.limits, [torch.zeros(2, 2)], VOCAB)
    case = poisoned_step(step, torch.Generator().manual_seed(0))
    before = [operand[:9].clone() for operand in case.operands]
    (keys, *_), pages = run_step(toy, case, toy.signature)[1], {0, *case.live[0].pages}
    # The case itself is what it was, with NaN in the null page.
    assert all(torch.equal(a[:9].nan_to_num(9), b.nan_to_num(9)) for a, b in zip(case.operands, before, strict=True))
    assert case.operands[1][0].isnan().all()
    assert keys.nbytes >= 2**25
    assert resident_bytes([keys]) < 2**20
    written = set(keys.isfinite().flatten(1).any(1).nonzero().flatten().tolist())
    assert written
    assert written <= pages
