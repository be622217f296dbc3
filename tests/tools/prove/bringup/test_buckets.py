"""tools/prove/bringup/buckets.py: rows leave the comparison with their first other token, and too many of them are a failure."""

from __future__ import annotations

import numpy as np

from npucompile.graphs.types import Bucket
from npucompile.tools.agreement.pools import PoolPlaces
from npucompile.tools.prove.bringup.buckets import Comparison
from npucompile.tools.prove.bringup.steps import PlannedStep

ROWS = tuple(PoolPlaces((i,), (i,), i) for i in range(1, 4))
STEP = PlannedStep(Bucket("decode", 4, 2), ({},), ROWS)


class Oracle:
    """Gives the same tokens in every step."""

    def step(self, step):
        return [outputs([[1, 2], [3, 4], [5, 6], [0, 0]], [2, 1, 2, 0])]


def outputs(tokens, counts):
    return {"tokens": np.array(tokens, np.int32), "counts": np.array(counts, np.int32)}


def test_only_tokens_that_were_taken_are_compared():
    comparison = Comparison(10, Oracle())
    comparison.add("step", STEP, [outputs([[1, 2], [3, 9], [5, 6], [7, 7]], [2, 1, 2, 0])])
    assert (comparison.compared, comparison.different, comparison.too_many) == (3, set(), False)


def test_a_row_with_other_tokens_counts_once_and_comes_back_with_its_next_request():
    comparison = Comparison(10, Oracle())
    for _ in range(3):
        comparison.add("step", STEP, [outputs([[1, 2], [3, 4], [5, 7], [0, 0]], [2, 1, 2, 0])])
    assert (comparison.different, len(comparison.messages), comparison.compared) == ({(0, 3)}, 1, 7)
    assert comparison.too_many
    comparison.forget(ROWS[2:])
    assert comparison.different == set()


def test_without_an_oracle_tokens_must_be_legal():
    comparison = Comparison(6, None)
    comparison.add("step", STEP, [outputs([[1, 2], [3, 4], [5, 6], [0, 0]], [2, 1, 2, 0])])
    assert comparison.different == {(0, 3)}
    assert comparison.state_errors({}, ROWS) == []
