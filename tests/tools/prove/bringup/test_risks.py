"""tools/prove/bringup/risks.py: short names and headings are those of docs/on-hardware.md."""

from __future__ import annotations

import re
from pathlib import Path

from npucompile.tools.prove.bringup.risks import ASSUMPTIONS

PAGE = Path(__file__).parents[4] / "docs" / "on-hardware.md"


def test_the_page_and_the_code_have_the_same_rows_and_risks_by_the_same_names():
    text = PAGE.read_text()
    rows = text[text.index("## What is not") : text.index("## The checklist")]
    named = re.findall(r"^(?:\| |\d+\. )\*\*(.+?)\*\* \(`([\w-]+)`\)", rows, re.MULTILINE)
    assert {name: heading for heading, name in named} == dict(ASSUMPTIONS)
    assert len(re.findall(r"^(?:\| |\d+\. )\*\*", rows, re.MULTILINE)) == len(ASSUMPTIONS)
