"""server/requests/tool_fields.py: which tools a prompt has, and which may be called."""

from __future__ import annotations

import pytest

from npucompile.server.requests.tool_fields import Declared, Offer, ToolChoice, ToolUse

TOOLS = tuple({"type": "function", "function": {"name": name, "strict": name == "b"}} for name in "ab")
OFFERS = [Offer(tool, Declared(tool["function"]["name"])) for tool in TOOLS]


@pytest.mark.parametrize(
    ("use", "offered", "names", "constrains"),
    [
        (ToolUse(), 0, "", False),
        (ToolUse(TOOLS), 2, "ab", True),
        (ToolUse(TOOLS[:1]), 1, "a", False),
        (ToolUse(TOOLS[:1], parallel=False), 1, "a", True),
        (ToolUse(TOOLS[:1], "required"), 1, "a", True),
        (ToolUse(TOOLS, "none"), 0, "", False),
        (ToolUse.of(OFFERS, ToolChoice("a"), True), 2, "a", True),
        (ToolUse.of(OFFERS, None, True), 2, "ab", True),
        (ToolUse.of(OFFERS, ToolChoice(None, ("a",), "auto"), True), 1, "a", False),
        (ToolUse.of(OFFERS, ToolChoice(None, ("a",), "required"), True), 1, "a", True),
        (ToolUse.of(OFFERS, ToolChoice(None, (), "auto"), True), 0, "", False),
    ],
)
def test_what_is_offered_and_what_may_be_called(use, offered, names, constrains):
    assert (len(use.offered), "".join(tool["name"] for tool in use.callable), use.constrains) == (offered, names, constrains)


def test_of_several_tools_of_a_name_the_last_counts():
    again = Offer({"type": "function", "function": {"name": "a", "description": "newer"}}, Declared("a", custom=True))
    use = ToolUse.of([*OFFERS, again], "auto", True)
    assert use.tools == (again.function, TOOLS[1])
    assert use.declared == {"a": again.declared}
