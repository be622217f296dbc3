"""runtime/steps/resized.py: rows of a step keep what they have in steps of other sizes, and run in as few buckets as hold them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs.errors import SpecError
from npucompile.graphs.steps.decode import DECODE
from npucompile.graphs.steps.inputs import OPTIONAL_ROWS
from npucompile.graphs.steps.prefill import PREFILL
from npucompile.graphs.steps.table import StepInputs
from npucompile.graphs.types import Bucket, Limits
from npucompile.runtime.adjustments import Adjustment
from npucompile.runtime.steps.pack import pack
from npucompile.runtime.steps.resized import long_enough, resized, whole_steps
from npucompile.runtime.steps.rows import DecodeRow, PrefillRow

LIMITS = Limits(4, 20, 9, 16, 1, 0, bitmasks=2, bitmask_words=3, logit_adjustments=4, adjusted_tokens=40)


def decode_rows(masked: tuple[int, ...], biased: tuple[int, ...], count: int) -> list[DecodeRow]:
    def row(i: int) -> DecodeRow:
        bitmask = np.full((1, 3), i, np.int32) if i in masked else None
        adjustment = Adjustment(bias=np.full((1, 40), i + 0.5, np.float32)) if i in biased else None
        return DecodeRow(1 + i, 3, [1 + i], [1 + i], bitmask=bitmask, adjustment=adjustment)

    return [row(i) for i in range(count)]


@given(st.permutations(range(5)), st.integers(1, 5), st.integers(0, 2), st.integers(0, 2), st.integers(0, 3))
def test_rows_keep_what_they_have_alone(order: list[int], taken: int, masked: int, biased: int, padding: int) -> None:
    """Whatever is numbered among rows is the same as if these had been packed by themselves."""
    rows = decode_rows(tuple(order[:masked]), tuple(order[2 : 2 + biased]), 5)
    inputs = pack(Bucket("decode", 5, 1), rows, LIMITS)
    some = sorted(order[:taken])
    bucket = Bucket("decode", taken + padding, 1)
    own = resized(inputs, some, StepInputs(bucket, LIMITS))
    expected = pack(bucket, [rows[i] for i in some], LIMITS)
    assert own.keys() == expected.keys()
    assert all(own[name].dtype == expected[name].dtype and np.array_equal(own[name], expected[name]) for name in own)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6), st.integers(8, 9))
def test_a_step_runs_in_the_bucket_that_pads_it_least(lengths: list[int], longest: int) -> None:
    buckets = [Bucket("prefill", 1, 4), Bucket("prefill", 4, 4), Bucket("prefill", 2, longest), Bucket("decode", 8, 1)]
    rows = [PrefillRow(list(range(1, 1 + n)), 0, [1, 2, 3], 1 + i, 1 + i) for i, n in enumerate(lengths)]
    inputs = pack(Bucket("prefill", len(rows), max(lengths)), rows, LIMITS)
    parts = list(whole_steps(buckets[0], inputs, buckets, LIMITS, logprobs=False))
    assert [i for part in parts for i in part.rows] == list(range(len(rows)))
    holding = [bucket for bucket in buckets[:3] if bucket.q_len >= max(lengths)]
    assert sum(part.bucket.tokens for part in parts) == min(-(-len(rows) // b.batch) * b.tokens for b in holding)
    for part in parts:
        expected = pack(part.bucket, [rows[i] for i in part.rows], LIMITS)
        assert all(np.array_equal(part.inputs[name], expected[name]) for name in expected)


def test_a_row_that_no_bucket_holds_is_named() -> None:
    inputs = pack(Bucket("prefill", 1, 9), [PrefillRow(list(range(9)), 0, [1, 2, 3], 1, 1)], LIMITS)
    with pytest.raises(SpecError, match=r"a prefill row of 9 tokens; legal is what one of prefill-b1-q8 holds"):
        list(whole_steps(Bucket("prefill", 1, 8), inputs, [Bucket("prefill", 1, 8)], LIMITS, logprobs=False))


def test_what_few_rows_have_is_padded_as_all_is() -> None:
    inputs = pack(Bucket("decode", 1, 1), decode_rows((), (), 1), LIMITS)
    own = resized(inputs, [0], StepInputs(Bucket("decode", 2, 1), LIMITS))
    assert all((own[name] == DECODE.padding[name]).all() for name in OPTIONAL_ROWS)
    assert own["top_p"].tolist() == [1, DECODE.padding["top_p"]]


@given(st.integers(1, 8))
def test_short_chunks_are_as_long_as_executables_of_any_size_take(length: int) -> None:
    rows = [PrefillRow(list(range(1, 1 + length)), 0, [1, 2], 1, 1)]
    inputs = pack(Bucket("prefill", 1, length), rows, LIMITS)
    expected = pack(Bucket("prefill", 1, max(length, PREFILL.least)), rows, LIMITS)
    own = long_enough(Bucket("prefill", 1, length), inputs, LIMITS, logprobs=False)
    assert all(np.array_equal(own[name], expected[name]) for name in expected)
