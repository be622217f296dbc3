"""server/requests/tool_fields.py: which tools a prompt has, and which may be called."""

from __future__ import annotations

import pytest

from npucompile.server.requests.tool_fields import ToolUse

TOOLS = tuple({"type": "function", "function": {"name": name, "strict": name == "b"}} for name in "ab")


@pytest.mark.parametrize(
    ("use", "offered", "names", "constrains"),
    [
        (ToolUse(), 0, "", False),
        (ToolUse(TOOLS), 2, "ab", True),
        (ToolUse(TOOLS[:1]), 1, "a", False),
        (ToolUse(TOOLS[:1], parallel=False), 1, "a", True),
        (ToolUse(TOOLS[:1], "required"), 1, "a", True),
        (ToolUse(TOOLS, "none"), 0, "", False),
        (ToolUse.of(TOOLS, {"name": "a"}, "a", True), 2, "a", True),
        (ToolUse.of(TOOLS, None, None, True), 2, "ab", True),
    ],
)
def test_what_is_offered_and_what_may_be_called(use, offered, names, constrains):
    assert (len(use.offered), "".join(tool["name"] for tool in use.callable), use.constrains) == (offered, names, constrains)
