"""tools/agreement/poisoned_steps.py: what no live row may read is NaN, and drafts are right so that every count of them is accepted."""

from __future__ import annotations

from support.toy_step import DRAFTING, Toy, poisoned_steps

from npucompile.graphs.types import Bucket


def test_every_count_of_accepted_drafts_occurs() -> None:
    bucket = Bucket("decode", 3, 3)
    (case,) = poisoned_steps(bucket, DRAFTING, (3,), seeds=1)
    counts = Toy(bucket, DRAFTING)([t.clone() for t in case.operands])[2]
    assert sorted(counts.tolist()) == [1, 2, 3]
