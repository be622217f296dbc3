"""tools/agreement/poisoned_steps.py: what no live row may read is NaN, and drafts are right so that every count of them is accepted."""

from __future__ import annotations

from dataclasses import replace

import torch
from support.residency import resident_bytes
from support.toy_step import DRAFTING, Toy, poisoned_steps

from npucompile.graphs.types import Bucket
from npucompile.tools.agreement.poisoned_steps import run_step


def test_every_count_of_accepted_drafts_occurs() -> None:
    bucket = Bucket("decode", 3, 3)
    (case,) = poisoned_steps(bucket, DRAFTING, (3,), seeds=1)
    counts = Toy(bucket, DRAFTING)([t.clone() for t in case.operands])[2]
    assert sorted(counts.tolist()) == [1, 2, 3]


def test_pools_after_a_step_take_memory_only_where_it_wrote() -> None:
    bucket, limits = Bucket("decode", 3, 3), replace(DRAFTING, num_pages=2**20)
    (case,) = poisoned_steps(bucket, limits, (3,), seeds=1)
    toy = Toy(bucket, limits)
    before = [operand[:9].clone() for operand in case.operands]
    (keys, *_), pages = run_step(toy, case, toy.signature)[1], {0, *(page for row in case.live for page in row.pages)}
    # The case itself is what it was, with NaN in the null page.
    assert all(torch.equal(a[:9].nan_to_num(9), b.nan_to_num(9)) for a, b in zip(case.operands, before, strict=True))
    assert case.operands[1][0].isnan().all()
    assert keys.nbytes >= 2**25
    assert resident_bytes([keys]) < 2**20
    written = set(keys.isfinite().flatten(1).any(1).nonzero().flatten().tolist())
    assert written
    assert written <= pages
