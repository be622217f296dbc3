"""server/requests/frames.py: which frames are read, which are refused and by what name, and that what is encoded is decoded."""

from __future__ import annotations

import json

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs.errors import ProtocolError
from npucompile.server.requests.frames import JSON, MSGPACK, SUBPROTOCOLS, choose_subprotocol, decode, encode

LIMIT = 2**20


@pytest.mark.parametrize(
    ("frame", "subprotocol", "code"),
    [
        (b"\xff\xfe", JSON, "invalid_utf8"),
        ("\ud800", JSON, "invalid_utf8"),
        ('{"input":"\\ud83d"}', JSON, "invalid_utf8"),
        ('{"\\uDC00":1}', JSON, "invalid_utf8"),
        ("{", JSON, "invalid_json"),
        ("", JSON, "invalid_json"),
        ("{} {}", JSON, "invalid_json"),
        ('{"a":NaN}', JSON, "invalid_json"),
        ('{"a":-Infinity}', JSON, "invalid_json"),
        ("[" * 100_000, JSON, "invalid_json"),
        ("1" * 10_000, JSON, "invalid_json"),
        ("[1]", JSON, "not_an_object"),
        ("null", JSON, "not_an_object"),
        (b"", MSGPACK, "invalid_msgpack"),
        (b"\xc1", MSGPACK, "invalid_msgpack"),
        (b"\x80\x80", MSGPACK, "invalid_msgpack"),
        (b"\x81\xa1", MSGPACK, "invalid_msgpack"),
        (b"\xa2\xff\xff", MSGPACK, "invalid_msgpack"),
        (b"\x91" * 100_000, MSGPACK, "invalid_msgpack"),
        (msgpack.packb([1]), MSGPACK, "not_an_object"),
        (msgpack.packb({b"type": 1}), MSGPACK, "not_an_object"),
        (msgpack.packb({"a": [{"b": float("nan")}]}), MSGPACK, "invalid_msgpack"),
        (msgpack.packb({"a": float("-inf")}, use_single_float=True), MSGPACK, "invalid_msgpack"),
        ("{}", MSGPACK, "wrong_frame_kind"),
        ("x" * (LIMIT + 1), JSON, "frame_too_large"),
        ("ü" * (LIMIT // 2 + 1), JSON, "frame_too_large"),
        (b"x" * (LIMIT + 1), MSGPACK, "frame_too_large"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_bad_frame_is_named(frame, subprotocol, code):
    with pytest.raises(ProtocolError) as caught:
        decode(frame, subprotocol, LIMIT)
    assert caught.value.code == code
    assert len(str(caught.value)) < 400


def test_the_largest_legal_frame_is_read():
    frame = json.dumps({"input": ""})
    frame = json.dumps({"input": "x" * (LIMIT - len(frame))})
    assert len(frame) == LIMIT
    assert decode(frame, JSON, LIMIT)["input"].startswith("xxx")


def test_json_is_read_from_binary_frames_too_and_whole_surrogate_pairs_are_text():
    assert decode(b'{"a":"\xc3\xbc"}', JSON, LIMIT) == {"a": "ü"}
    assert decode('{"a":"\\ud83d\\ude42"}', JSON, LIMIT) == {"a": "🙂"}


def test_a_text_that_looks_like_an_infinity_is_a_text():
    event = {"a": b"\xca\x7f\x80\x00\x00".decode("latin-1"), "b": 2**70.0, "c": 0x7F800000}
    assert decode(encode(event, MSGPACK), MSGPACK, LIMIT) == event


NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
LEAVES = st.none() | st.booleans() | NUMBERS | st.text(max_size=20)
KEYS = st.text(max_size=8)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=6)


@given(st.dictionaries(KEYS, VALUES, max_size=5), st.sampled_from(SUBPROTOCOLS))
def test_what_is_encoded_is_decoded(event, subprotocol):
    frame = encode(event, subprotocol)
    assert isinstance(frame, bytes if subprotocol == MSGPACK else str)
    assert decode(frame, subprotocol, LIMIT) == event


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [([], None), ([JSON], JSON), ([MSGPACK], MSGPACK), (["other", MSGPACK, JSON], MSGPACK)],
)
def test_the_first_offered_subprotocol_that_is_spoken_is_taken(offered, chosen):
    assert choose_subprotocol(offered) == chosen


def test_only_foreign_subprotocols_are_refused():
    with pytest.raises(ProtocolError, match=r"\['graphql-ws'\] are not spoken here; legal are .*npucompile\.json.*npucompile\.msgpack"):
        choose_subprotocol(["graphql-ws"])
