"""What goes over the connection of a pair: whatever arrives is a message whose every field is legal, or is refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs.errors import ProtocolError
from npucompile.runtime.kv_transfer.messages import (
    MOST_BYTES,
    Abort,
    Ask,
    Computed,
    Declined,
    Done,
    Failed,
    Gone,
    Hello,
    Message,
    Ready,
    Refused,
    Renew,
    Renewed,
    Sessions,
    decode,
    encode,
    room_of,
)

MESSAGES: list[Message] = [
    Hello(1, msgspec.Raw(b'{"model":"m"}'), ["host:1"], "host"),
    Refused("why"),
    Ask(2**62, [1, 2], "salt", "tenant", -1, 2**63 - 1),
    Declined(7, 400, "why"),
    *(Computed(1, 16), Ready(1, 0, [3, 4], 1, 5), Sessions(["host:1"]), Done(1), Failed(1, "why"), Abort(1), Gone(1)),
    *(Abort(1, again=True), Renew(2.5), Renewed(2.5)),
]


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_arrive_as_they_are_sent(message):
    assert encode(decode(encode(message))) == encode(message)
    assert type(decode(encode(message))) is type(message)


@pytest.mark.parametrize(
    "text",
    [
        *("[]", "{}", "{", '{"type":"other"}', '{"type":"done"}', '{"type":"done","room":"1"}', '{"type":"done","room":1,"more":2}'),
        *("[" * 100_000, " " * (MOST_BYTES + 1), '{"type":"done","room":1e999}', '{"type":"done","room":true}'),
    ],
)
def test_others_are_refused(text):
    with pytest.raises(ProtocolError, match="legal"):
        decode(text)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


def typed(value: Any, kind: Any) -> bool:
    """Whether a value is of a field's type, by the standard library's own idea of it."""
    if kind in ("Number", "int", "Seconds", "float"):
        return type(value) is int or (kind in ("Seconds", "float") and type(value) is float)
    return (isinstance(value, list) and all(typed(item, "Number" if "Number" in kind else "str") for item in value)) or (
        kind == "str" and isinstance(value, str)
    )


@given(st.sampled_from(MESSAGES[1:]), st.data())
def test_every_field_of_what_arrives_has_its_type(message: Message, data: st.DataObject) -> None:
    fields = json.loads(encode(message))
    name = data.draw(st.sampled_from(message.__struct_fields__))
    fields[name] = data.draw(ANYTHING)
    try:
        found = decode(json.dumps(fields))
    except ProtocolError:
        assert room_of(json.dumps(fields)) in (None, fields.get("room"))
        return
    kind = type(message).__annotations__[name]
    value = getattr(found, name)
    assert typed(value, "int" if kind.startswith("Annotated") else kind), (kind, value)
    hash(value if not isinstance(value, list) else tuple(value))
