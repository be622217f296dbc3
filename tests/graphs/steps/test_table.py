"""graphs/steps/: names, order and shapes of a bucket's inputs, and their values in padding rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from npucompile.graphs.steps.inputs import OPTIONAL_ROWS
from npucompile.graphs.steps.table import StepInputs, kind_of
from npucompile.graphs.types import Bucket, Limits

LIMITS = Limits(page_size=4, num_pages=9, num_slots=5, max_model_len=24)


@pytest.mark.parametrize("bucket", [Bucket("prefill", 2, 16), Bucket("decode", 2, 4)])
def test_padding_has_the_shapes_of_the_graph_and_inert_values(bucket):
    inputs = StepInputs(bucket, replace(LIMITS, slots_per_request=4, drafts=3), logprobs=True)
    padding = inputs.padding()
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in padding.items()} == {
        name: (aval.shape, aval.dtype) for name, aval in inputs.avals().items()
    }
    inert = {"top_p": 1, "next_tokens": -1}
    assert all((tensor == inert.get(name, 0)).all() for name, tensor in padding.items())


@pytest.mark.parametrize(("bucket", "rows"), [(Bucket("prefill", 2, 16), 2), (Bucket("decode", 8, 4), 3)])
def test_bitmasks_come_last_and_are_no_more_than_rows(bucket, rows):
    """A step that has none then need not send them."""
    limits = replace(LIMITS, slots_per_request=4, drafts=3)
    avals = StepInputs(bucket, replace(limits, bitmasks=3, bitmask_words=7)).avals()
    assert list(avals) == [*StepInputs(bucket, limits).avals(), "bitmask_rows", "bitmask"]
    assert avals["bitmask_rows"].shape == (bucket.batch,)
    assert avals["bitmask"].shape == (rows, kind_of(bucket).sampled(bucket), 7)


@pytest.mark.parametrize(("bucket", "rows"), [(Bucket("prefill", 1, 16), 2), (Bucket("decode", 8, 4), 5)])
def test_adjustments_come_after_bitmasks_and_are_no_more_than_rows_have(bucket, rows):
    limits = replace(LIMITS, slots_per_request=4, drafts=3, bitmasks=3, bitmask_words=7)
    avals = StepInputs(bucket, limits.with_adjustments(5, 200)).avals()
    own = ["bias_rows", "penalty_rows", "seen_rows", "repetition_penalty"]
    *others, bitmask = StepInputs(bucket, limits).avals()
    assert list(avals) == [*others, *own, bitmask, "seen", "adjustments"]
    assert {name: avals[name].shape for name in ("seen", "adjustments")} == {
        "seen": (rows, kind_of(bucket).sampled(bucket), 7),
        "adjustments": (rows, kind_of(bucket).sampled(bucket), 200),
    }
    assert list(avals)[-3:] == list(OPTIONAL_ROWS)
