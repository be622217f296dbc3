"""tools/agreement/poisoned_steps.py: what a live row may not read is NaN, and a run of a step changes nothing else."""

from __future__ import annotations

from dataclasses import replace

import torch
from support.residency import resident_bytes
from support.toy_step import DRAFTING, VOCAB, Toy

from npucompile.graphs.types import Bucket
from npucompile.tools.agreement.poisoned_steps import ProvedStep, drafted_step, poisoned_step, run_step
from npucompile.tools.agreement.pools import request_slot_pool


def step_of(toy: Toy) -> ProvedStep:
    return ProvedStep(toy.bucket, toy.signature, toy.limits, [torch.zeros(2, 2)], VOCAB)


def test_pools_after_a_step_take_memory_only_where_it_wrote() -> None:
    toy = Toy(Bucket("decode", 1, 3), replace(DRAFTING, num_pages=2**20))
    case = poisoned_step(step_of(toy), torch.Generator().manual_seed(0))
    keys, pages = case.operands[1], {0, *case.live[0].pages}
    assert keys[0].isnan().all()
    run_step(toy, case, toy.signature)
    assert keys.nbytes >= 2**25
    assert resident_bytes([keys]) < 2**20
    written = set(keys.isfinite().flatten(1).any(1).nonzero().flatten().tolist())
    assert written
    assert written <= pages


def test_steps_that_find_right_drafts_change_nothing_else() -> None:
    toy = Toy(Bucket("decode", 1, 3), DRAFTING)
    step = step_of(toy)
    plain = poisoned_step(step, torch.Generator().manual_seed(0), turn=2)
    drafted = drafted_step(toy, step, torch.Generator().manual_seed(0), share=1, turn=2)
    different = [
        position
        for position, (a, b) in enumerate(zip(plain.operands, drafted.operands, strict=True))
        if not torch.equal(a.nan_to_num(9), b.nan_to_num(9))
    ]
    assert different == [len(step.params) + request_slot_pool(step.signature.state)]


def test_a_row_has_a_page_where_there_are_fewer_than_rows_that_share_them() -> None:
    """Prompts that share a step are four; a context of two pages for one request has no fourth of them."""
    step = step_of(toy := Toy(Bucket("prefill", 1, 4), replace(DRAFTING, num_pages=3)))
    for turn in range(8):
        case = poisoned_step(step, torch.Generator().manual_seed(turn), share=4, turn=turn, chunk=1)
        assert 0 < len(case.live[0].pages) <= 2
        assert case.live[0].start + case.live[0].count <= len(case.live[0].pages) * toy.limits.page_size
