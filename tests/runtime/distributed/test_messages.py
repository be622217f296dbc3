"""runtime/distributed/messages.py: messages survive any split of the stream, and other bytes are refused."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import ranks

from npucompile.graphs.errors import ProtocolError
from npucompile.runtime.distributed import messages as module
from npucompile.runtime.distributed.messages import HEADER, FrameDecoder, decode, encode, receive

DTYPES = ["int32", "float32", "int64", "uint8"]


def equal(a, b):
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return a == b


arrays = st.builds(
    lambda dtype, shape: np.arange(int(np.prod(shape)), dtype=dtype).reshape(shape),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
)
values = st.integers(-5, 5) | st.text(max_size=4) | arrays | st.dictionaries(st.sampled_from("xy"), arrays)
fields = st.dictionaries(st.sampled_from("abcd"), values)


@given(st.lists(st.tuples(st.sampled_from(["step", "stop"]), fields), max_size=4), st.data())
def test_messages_survive_however_the_bytes_are_cut(messages, data):
    stream = b"".join(encode(kind, **values) for kind, values in messages)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    frames, decoded = FrameDecoder(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        decoded += frames.feed(stream[start:end])
    assert len(decoded) == len(messages)
    for message, (kind, values) in zip(decoded, messages, strict=True):
        assert message.kind == kind
        assert equal(dict(values), dict(message.fields))


def test_arrays_are_new_and_may_be_written():
    (message,) = FrameDecoder().feed(encode("step", x=np.zeros((2, 3), np.int32)))
    message.fields["x"][0, 0] = 7
    assert message.fields["x"].flags.writeable


@pytest.mark.parametrize(
    "packed",
    [b"", b"\xc1", msgpack.packb(3), msgpack.packb(["a", 3]), msgpack.packb([1, {}]), msgpack.packb(["a", {"x": msgpack.ExtType(9, b"")}])],
)
def test_what_is_no_message_is_refused(packed):
    with pytest.raises(ProtocolError):
        decode(packed)


def test_a_pickled_array_is_refused():
    packed = msgpack.packb(["a", {"x": msgpack.ExtType(module.ARRAY_CODE, msgpack.packb(["|O", [1], b"12345678"]))}])
    with pytest.raises(ProtocolError, match="no message of a rank"):
        decode(packed)


def test_an_absurd_length_is_refused_before_anything_is_allocated():
    with pytest.raises(ProtocolError, match="legal is up to"):
        FrameDecoder().feed(HEADER.pack(1 << 60))
    near, far = ranks.connected()
    with near, far:
        near.sendall(HEADER.pack(module.MAX_HELLO_BYTES + 1))
        with pytest.raises(ProtocolError, match=f"legal is up to {module.MAX_HELLO_BYTES}"):
            receive(far)


def test_receive_reads_one_message_and_no_byte_more():
    near, far = ranks.connected()
    with near, far:
        near.sendall(encode("hello", a=1) + encode("next"))
        assert receive(far) == ("hello", {"a": 1})
        assert receive(far) == ("next", {})
        near.close()
        with pytest.raises(ConnectionResetError, match="the peer closed the connection"):
            receive(far)


def test_a_value_that_cannot_be_sent_is_refused():
    with pytest.raises(TypeError, match="a object cannot be sent between ranks"):
        encode("a", x=object())
