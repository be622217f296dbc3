import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npucompile.graphs.errors import SpecError
from npucompile.graphs.types import Bucket, Limits
from npucompile.runtime.buckets import Row, choose, choose_prefill, of_kind, pack, padded_rows, write_width
from npucompile.runtime.request import Sampling

LIMITS = Limits(page_size=4, num_pages=20, num_slots=9, max_model_len=16, slots_per_request=2)
ONE_OF_EACH = (Bucket("decode", 1, 1), Bucket("prefill", 1, 8))

decode_lists = st.lists(st.builds(lambda b: Bucket("decode", b, 1), st.integers(1, 20)), min_size=1, max_size=5)
prefill_lists = st.lists(st.builds(lambda q: Bucket("prefill", 1, q), st.integers(1, 40)), min_size=1, max_size=5)


@given(decode_lists, prefill_lists, st.integers(1, 60))
def test_choice_is_the_smallest_that_holds_it_else_the_largest(decode, prefill, live):
    buckets = [*prefill, *decode]
    batches = sorted(b.batch for b in decode)
    assert choose(buckets, live).batch == next((b for b in batches if b >= live), batches[-1])
    lengths = sorted(b.q_len for b in prefill)
    assert choose_prefill(buckets, live).q_len == next((q for q in lengths if q >= live), lengths[-1])
    assert choose(buckets, live).kind == "decode"
    assert choose_prefill(buckets, live).kind == "prefill"


def test_prefill_is_chosen_by_length_not_by_batch():
    wide, long = Bucket("prefill", 1, 64), Bucket("prefill", 4, 8)
    assert choose_prefill([wide, long], 8) == long
    assert choose_prefill([wide, long], 9) == wide


@pytest.mark.parametrize("count", [0, -1])
def test_no_bucket_for_nothing(count):
    with pytest.raises(SpecError, match="at least 1"):
        choose(ONE_OF_EACH, count)
    with pytest.raises(SpecError, match="at least 1"):
        choose_prefill(ONE_OF_EACH, count)


def test_a_missing_kind_is_named():
    with pytest.raises(SpecError, match=r"no prefill bucket among \['decode-b1-q1'\]"):
        of_kind(ONE_OF_EACH[:1], "prefill")


def test_padding_arithmetic():
    assert padded_rows(Bucket("decode", 8, 1), 5) == 3
    assert write_width(Bucket("decode", 8, 3)) == 3
    assert write_width(Bucket("prefill", 1, 32)) == 1


def rows_for(bucket: Bucket):
    W = write_width(bucket)

    @st.composite
    def row(draw):
        tokens = draw(st.lists(st.integers(1, 99), min_size=1, max_size=min(bucket.q_len, 16)))
        start = draw(st.integers(0, 16 - len(tokens)))
        needed = -(-(start + len(tokens)) // 4)
        return Row(
            tokens=tokens,
            start=start,
            pages=draw(st.lists(st.integers(1, 19), min_size=needed, max_size=4)),
            read_slot=draw(st.integers(1, 8)),
            write_slots=draw(st.lists(st.integers(1, 8), min_size=0, max_size=W)),
            sampling=Sampling(
                draw(st.sampled_from([0.0, 0.5])),
                draw(st.integers(0, 5)),
                draw(st.sampled_from([0.25, 1.0])),
                draw(st.sampled_from([0, 0.5])),
            ),
            uniforms=draw(st.lists(st.sampled_from([0.25, 0.75]), min_size=0, max_size=W)),
        )

    return st.lists(row(), min_size=0, max_size=bucket.batch)


BUCKETS = [Bucket("decode", 4, 1), Bucket("decode", 3, 3), Bucket("prefill", 1, 8), Bucket("prefill", 2, 5)]


def padded(values, length, filler=0):
    return [*values, *[filler] * (length - len(values))]


def expected(bucket, rows):
    """The step convention, spelled out with lists."""
    B, Q, W, N = bucket.batch, bucket.q_len, write_width(bucket), 4
    return {
        "tokens": [padded(r.tokens, Q) for r in rows] + [[0] * Q] * (B - len(rows)),
        "starts": padded([r.start for r in rows], B),
        "lengths": padded([len(r.tokens) for r in rows], B),
        "page_table": [padded(r.pages, N) for r in rows] + [[0] * N] * (B - len(rows)),
        "read_slots": padded([r.read_slot for r in rows], B),
        "write_slots": [padded(r.write_slots, W) for r in rows] + [[0] * W] * (B - len(rows)),
        "temperature": padded([r.sampling.temperature for r in rows], B),
        "top_k": padded([r.sampling.top_k for r in rows], B),
        "top_p": padded([r.sampling.top_p for r in rows], B, 1.0),
        "min_p": padded([r.sampling.min_p for r in rows], B),
        "uniform": [padded(r.uniforms, W) for r in rows] + [[0.0] * W] * (B - len(rows)),
    }


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(BUCKETS))
def test_pack_follows_the_convention_whatever_ran_before(data, bucket):
    # What an executor may leave in the arrays of the step before must not be seen again.
    for array in pack(bucket, data.draw(rows_for(bucket)), LIMITS).values():
        array.fill(-77)
    rows = data.draw(rows_for(bucket))
    arrays = pack(bucket, rows, LIMITS)
    want = expected(bucket, rows)
    assert list(arrays) == list(want)
    floats = {"temperature", "top_p", "min_p", "uniform"}
    for name, array in arrays.items():
        assert array.dtype == (np.float32 if name in floats else np.int32), name
        assert array.tolist() == want[name], name


ROW = Row(tokens=(1,), start=0, pages=(1,), read_slot=1, write_slots=(1,), uniforms=(0.5,))


@pytest.mark.parametrize(
    "rows, message",
    [
        ([ROW] * 3, "3 rows for decode-b2-q1, which holds 2"),
        ([ROW._replace(tokens=(1, 2))], "a row of 2 tokens for decode-b2-q1; legal is 1 to 1"),
        ([ROW._replace(tokens=())], "a row of 0 tokens"),
        ([ROW._replace(pages=(1, 2, 3, 4, 5))], "5 pages for one row; the page table holds 4"),
        ([ROW._replace(start=4)], "ends at position 5; its 1 pages of 4 tokens end before"),
        ([ROW._replace(write_slots=(1, 2))], "2 write slots and 1 uniforms .* up to 1"),
        ([ROW._replace(uniforms=(0.1, 0.2))], "1 write slots and 2 uniforms .* up to 1"),
    ],
)
def test_rows_that_do_not_fit_are_refused(rows, message):
    with pytest.raises(SpecError, match=message):
        pack(Bucket("decode", 2, 1), rows, LIMITS)
