"""runtime/steps/pack.py: rows of every kind are packed by the step convention, and those that do not fit are refused."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npucompile.graphs.errors import SpecError
from npucompile.graphs.ops.sample import Sample, sample_reference
from npucompile.graphs.steps.kind import SegmentSizes
from npucompile.graphs.steps.table import StepInputs
from npucompile.graphs.types import Bucket, Limits
from npucompile.runtime import picture_spans
from npucompile.runtime.picture_spans import PictureInput, Span
from npucompile.runtime.request import Sampling
from npucompile.runtime.steps.pack import pack
from npucompile.runtime.steps.rows import DecodeRow, Places, PrefillRow, SegmentRow

LIMITS = {drafts: Limits(4, 20, 1 + 4 * (drafts + 1), 16, drafts + 1, drafts) for drafts in (0, 2)}
ONE_OF_EACH = (Bucket("decode", 1, 1), Bucket("prefill", 1, 8))

samplings = st.builds(Sampling, st.sampled_from([0.0, 0.5]), st.integers(0, 5), st.sampled_from([0.25, 1.0]), st.sampled_from([0.0, 0.5]))


@st.composite
def prefill_rows(draw, bucket):
    tokens = draw(st.lists(st.integers(1, 99), min_size=1, max_size=min(bucket.q_len, 16)))
    start = draw(st.integers(0, 16 - len(tokens)))
    return PrefillRow(
        tokens=tokens,
        start=start,
        pages=draw(st.lists(st.integers(1, 19), min_size=-(-(start + len(tokens)) // 4), max_size=4)),
        slot=draw(st.integers(1, 8)),
        request_slot=draw(st.integers(1, 4)),
        next_token=draw(st.integers(-1, 99)),
        sampling=draw(samplings),
        uniform=draw(st.sampled_from([0.25, 0.75])),
        logprobs=draw(st.booleans()),
    )


@st.composite
def decode_rows(draw, bucket):
    Q = bucket.q_len
    base = draw(st.integers(0, 15))
    return DecodeRow(
        request_slot=draw(st.integers(1, 4)),
        base=base,
        pages=draw(st.lists(st.integers(1, 19), min_size=-(-min(base + 2 * Q - 1, 16) // 4), max_size=4)),
        slots=draw(st.lists(st.integers(1, 8), min_size=Q, max_size=Q)),
        drafts=draw(st.integers(0, Q - 1)),
        sampling=draw(samplings),
        uniforms=draw(st.just([]) | st.lists(st.sampled_from([0.25, 0.75]), min_size=2 * Q - 1, max_size=2 * Q - 1)),
        logprobs=draw(st.booleans()),
    )


def rows_for(bucket):
    return st.lists((decode_rows if bucket.kind == "decode" else prefill_rows)(bucket), max_size=bucket.batch)


def padded(values, length, filler=0):
    return [*values, *[filler] * (length - len(values))]


def tables(rows, bucket, width):
    return [padded(row, width) for row in rows] + [[0] * width] * (bucket.batch - len(rows))


def expected(bucket, rows, limits, max_logprobs):
    """The step convention, spelled out with lists."""
    B, Q = bucket.batch, bucket.q_len
    arrays = {
        "request_slots": padded([r.request_slot for r in rows], B),
        "page_table": tables([r.pages for r in rows], bucket, 4),
        "temperature": padded([r.sampling.temperature for r in rows], B),
        "top_k": padded([r.sampling.top_k for r in rows], B),
        "top_p": padded([r.sampling.top_p for r in rows], B, 1.0),
        "min_p": padded([r.sampling.min_p for r in rows], B),
    }
    if max_logprobs:
        arrays["logprobs"] = padded([int(r.logprobs) for r in rows], B)
    if bucket.kind == "decode":
        return arrays | {
            "drafts": padded([r.drafts for r in rows], B),
            "base": padded([r.base for r in rows], B),
            "state_slots_out": tables([r.slots for r in rows], bucket, Q),
            "uniform": tables([r.uniforms for r in rows], bucket, 2 * Q - 1),
        }
    arrays |= {
        "tokens": tables([r.tokens for r in rows], bucket, Q),
        "num_computed_tokens": padded([r.start for r in rows], B),
        "query_lens": padded([len(r.tokens) for r in rows], B),
        "state_slots_in": padded([r.slot for r in rows], B),
        "state_slots_out": tables([[r.slot] for r in rows], bucket, 1),
        "uniform": tables([[r.uniform] for r in rows], bucket, 1),
    }
    return arrays | ({"next_tokens": padded([r.next_token for r in rows], B, -1)} if limits.drafts else {})


CASES = [
    (Bucket("decode", 4, 1), 0, 0),
    (Bucket("decode", 3, 3), 2, 0),
    (Bucket("decode", 3, 3), 2, 5),
    (Bucket("prefill", 1, 8), 0, 0),
    (Bucket("prefill", 2, 5), 2, 0),
    (Bucket("prefill", 2, 5), 0, 5),
    (Bucket("prefill", 2, 5), 2, 5),
]


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from(CASES))
def test_pack_follows_the_convention_whatever_ran_before(data, case):
    bucket, drafts, max_logprobs = case
    limits = LIMITS[drafts]
    # An executor may write into the arrays of a step; the next step must not see it.
    for array in pack(bucket, data.draw(rows_for(bucket)), limits, max_logprobs=max_logprobs).values():
        array.fill(-77)
    rows = data.draw(rows_for(bucket))
    arrays = pack(bucket, rows, limits, max_logprobs=max_logprobs)
    want = expected(bucket, rows, limits, max_logprobs)
    assert set(arrays) == set(want)
    for name, array in arrays.items():
        assert array.tolist() == want[name], name


@pytest.mark.parametrize(("bucket", "drafts", "max_logprobs"), CASES)
def test_graphs_take_what_is_packed(bucket, drafts, max_logprobs):
    arrays = pack(bucket, [], LIMITS[drafts], max_logprobs=max_logprobs)
    avals = StepInputs(bucket, LIMITS[drafts], logprobs=max_logprobs > 0).avals()
    assert {name: (array.shape, str(array.dtype)) for name, array in arrays.items()} == {
        name: (aval.shape, str(aval.dtype).removeprefix("torch.")) for name, aval in avals.items()
    }


PREFILL = PrefillRow(tokens=(1,), start=0, pages=(1,), slot=1, request_slot=1)
DECODE = DecodeRow(request_slot=1, base=2, pages=(1, 2), slots=(1, 2, 3), drafts=2)


@pytest.mark.parametrize(
    ("bucket", "rows", "message"),
    [
        (Bucket("prefill", 2, 1), [PREFILL] * 3, "3 prompts for prefill-b2-q1, which holds 2"),
        (Bucket("prefill", 2, 1), [PREFILL._replace(tokens=(1, 2))], "a row of 2 tokens for prefill-b2-q1; legal is 1 to 1"),
        (Bucket("prefill", 2, 1), [PREFILL._replace(tokens=())], "a row of 0 tokens"),
        (Bucket("prefill", 2, 1), [PREFILL._replace(pages=(1, 2, 3, 4, 5))], "5 pages for one row; the page table holds 4"),
        (Bucket("prefill", 2, 1), [PREFILL._replace(start=4)], "ends at position 5; its 1 pages of 4 tokens end before"),
        (Bucket("prefill", 2, 1), [PREFILL._replace(request_slot=0)], "a row with request slot 0; legal is 1 to 4"),
        (Bucket("prefill", 2, 1), [PREFILL._replace(request_slot=5)], "a row with request slot 5; legal is 1 to 4"),
        (Bucket("prefill", 2, 1), [DECODE], "a DecodeRow for prefill-b2-q1; legal is PrefillRow"),
        (Bucket("decode", 2, 3), [PREFILL], "a PrefillRow for decode-b2-q3; legal is DecodeRow"),
        (
            Bucket("decode", 2, 3),
            [DECODE._replace(slots=(1, 2))],
            "a row of 2 slots and 0 uniforms .* legal is 3 slots, and 5 uniforms or none",
        ),
        (Bucket("decode", 2, 3), [DECODE._replace(uniforms=(0.1,))], "a row of 3 slots and 1 uniforms"),
        (Bucket("decode", 2, 3), [DECODE._replace(drafts=3)], "a row of 3 drafts for decode-b2-q3; legal is 0 to 2"),
        (Bucket("decode", 2, 3), [DECODE._replace(drafts=-1)], "a row of -1 drafts"),
        # Three candidates, and two drafts after the last.
        (Bucket("decode", 2, 3), [DECODE._replace(base=4)], "ends at position 9; its 2 pages of 4 tokens end before"),
        (Bucket("decode", 2, 3), [DECODE._replace(base=15, pages=(1, 2, 3))], "ends at position 16; its 3 pages"),
    ],
)
def test_rows_that_do_not_fit_are_refused(bucket, rows, message):
    with pytest.raises(SpecError, match=message):
        pack(bucket, rows, LIMITS[2])


def test_a_top_p_below_what_float32_knows_keeps_the_most_likely_token():
    row = PrefillRow((1,), 0, (1,), 1, 1, sampling=Sampling(temperature=1.0, top_p=1e-60))
    arrays = pack(Bucket("prefill", 1, 4), [row], Limits(4, 9, 9, 16))
    logits = torch.tensor([[[0.0, 1.0, 3.0, 2.0]]])
    sampling = (torch.from_numpy(arrays[name]) for name in ("temperature", "top_k", "top_p", "min_p"))
    # It was token 0: with a top_p of 0 none is kept.
    assert sample_reference(Sample(logits, *sampling, torch.tensor([[0.5]]))).tolist() == [[2]]


def test_places_of_a_prompt_with_pictures_are_packed_and_text_is_at_its_index() -> None:
    limits = Limits(8, 9, 5, 64, picture_rows=20)
    spans = picture_spans.spans([7, 90, 90, 8, 9], {90: [(1, 2, 4)]}, 2)
    places = Places(picture_spans.positions(5, spans)[1:4], [11, 12, 0, 0])
    rows = [PrefillRow((90, 90, 8), 1, (1,), 1, 1, places=places), PrefillRow((3, 4), 2, (2,), 2, 2)]
    arrays = pack(Bucket("prefill", 3, 4), rows, limits)
    assert arrays["positions"].tolist() == [
        [[1, 1, 1], [1, 1, 2], [3, 3, 3], [0, 0, 0]],
        [[2, 2, 2], [3, 3, 3], [0, 0, 0], [0, 0, 0]],
        [[0, 0, 0]] * 4,
    ]
    assert arrays["picture_rows"].tolist() == [[11, 12, 0, 0, 0], [0] * 5, [0] * 5]


def test_pictures_that_a_graph_does_not_take_are_refused() -> None:
    row = PrefillRow((90,), 0, (1,), 1, 1, places=Places(np.zeros((1, 3), np.int32), [20, 0]))
    with pytest.raises(SpecError, match="a row with pictures, and the graphs keep 0 rows of pictures; legal is a row without"):
        pack(Bucket("prefill", 1, 4), [row], Limits(8, 9, 5, 64))
    with pytest.raises(SpecError, match="a row with rows of pictures 0 to 20; legal is 0 to 19"):
        pack(Bucket("prefill", 1, 4), [row], Limits(8, 9, 5, 64, picture_rows=20))


ENCODES, SIZES = Bucket("encode", 3, 16), SegmentSizes(patch_dim=24, merged=4)
PICTURES = Limits(4, 9, 9, 16, picture_rows=20)


def picture(rows: int, columns: int, width: int) -> PictureInput:
    patches = np.random.default_rng(width).integers(0, 256, (4 * rows * columns, width)).astype(np.uint8)
    return PictureInput(Span(3, rows, columns), patches, (2 * rows, 2 * columns), b"digest")


def test_a_still_stands_in_all_frames_and_a_frame_pair_as_it_is() -> None:
    still, pair = picture(1, 2, 12), picture(2, 2, 24)
    arrays = pack(ENCODES, [SegmentRow(still, (7, 5)), SegmentRow(pair, (1, 2, 3, 9))], PICTURES, segments=SIZES)
    assert {name: (array.dtype, array.shape) for name, array in arrays.items()} == {
        "patches": (np.uint8, (3, 16, 24)),
        "grids": (np.int32, (3, 2)),
        "picture_rows": (np.int32, (3, 4)),
    }
    # By channel, frame, row and column in a patch.
    frames = arrays["patches"][0, :8].reshape(8, 3, 2, 2, 2)
    for frame in range(2):
        assert (frames[:, :, frame] == still.patches.reshape(8, 3, 2, 2)).all()
    assert (arrays["patches"][1] == pair.patches).all()
    assert arrays["grids"].tolist() == [[2, 4], [4, 4], [0, 0]]
    assert arrays["picture_rows"].tolist() == [[7, 5, 0, 0], [1, 2, 3, 9], [0, 0, 0, 0]]
    assert not arrays["patches"][0, 8:].any()
    assert not arrays["patches"][2].any()


@pytest.mark.parametrize(
    "segments, message",
    [
        ([SegmentRow(picture(1, 1, 12), (1,))] * 4, "4 segments for encode-b3-q16, which holds 3"),
        (
            [SegmentRow(picture(1, 5, 12), (1, 2, 3, 4, 5))],
            "20 patches of 12 values for 5 rows; encode-b3-q16 takes up to 16 of 24, 4 a row",
        ),
        ([SegmentRow(picture(1, 1, 9), (1,))], "4 patches of 9 values for 1 rows"),
        ([SegmentRow(picture(1, 2, 24), (1,))], "8 patches of 24 values for 1 rows"),
    ],
)
def test_pictures_that_do_not_fit_are_refused(segments: list[SegmentRow], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        pack(ENCODES, segments, PICTURES, segments=SIZES)
    with pytest.raises(SpecError, match="nothing says what its segments are"):
        pack(ENCODES, segments, PICTURES)
