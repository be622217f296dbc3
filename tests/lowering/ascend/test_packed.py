"""lowering/ascend/packed.py: bytes that are no file of a format are refused, and both formats are."""

from __future__ import annotations

import msgpack
import pytest

from npucompile.graphs.errors import LoweringError
from npucompile.lowering.ascend import ge_file
from npucompile.lowering.ascend.acl_graph import file
from npucompile.lowering.ascend.packed import fields_of


def test_fields_are_those_that_were_packed() -> None:
    assert fields_of(msgpack.packb({"format": "a/1", "x": [1]}), "a/1") == {"format": "a/1", "x": [1]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (msgpack.packb({"format": "a/0"}), "but 'a/0'; build the artifact again"),
        (msgpack.packb({}), "but None; build"),
        (msgpack.packb([1]), "but 'list'; build"),
        (b"\xc1", "FormatError"),
        (b"", "[Uu]npack"),
    ],
)
def test_other_bytes_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(LoweringError, match=f"this is not a file of format 'a/1'.*{message}"):
        fields_of(data, "a/1")
    for module in (ge_file, file):
        with pytest.raises(LoweringError, match=f"this is not a file of format {module.FORMAT!r}.*{message}"):
            module.decode(data)
