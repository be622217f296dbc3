"""tools/inspection/flame.py: rectangles lie within their parents, widths are times, and the page needs nothing from elsewhere."""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser

import pytest

from npucompile.lowering.ascend.cost.estimate import Lasting, OperatorCost, StepCost
from npucompile.tools.inspection import flame

OPERATORS = (
    OperatorCost("full_attention", "MatMul", 4, {"launch": 0.5, "memory": 1.5}, 2e6, 0),
    OperatorCost("full_attention", "HcomAllReduce", 1, {"collectives": 3.0}, 0, 1e6),
    OperatorCost("<epilogue>", "Cast", 2, {"launch": 1.0, "memory": 0.0}, 1e3, 0),
)
STEP = StepCost(
    8.0, 1.0, {"launch": 1.5, "memory": 1.5, "collectives": 3.0, "waiting": 2.0}, OPERATORS, 7, {}, {},
    {"full_attention": 2, "<epilogue>": 1}, 2e6, 1e6, 64, "ascend910_93",
)  # fmt: skip


class Rectangles(HTMLParser):
    """(left, width, top) in percent and pixels by the text of its rectangle."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str]]] = []
        self.found: list[tuple[str, str, float, float, int]] = []

    def handle_starttag(self, tag, attrs):
        if tag != "meta":
            self.open.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        tag, attrs = self.open[-1] if self.open else ("", {})
        if tag == "div" and "title" in attrs:
            left, width, top = (float(re.search(rf"{name}:([\d.]+)", attrs["style"])[1]) for name in ("left", "width", "top"))
            self.found.append((data, attrs["title"], left, width, int(top)))


@pytest.fixture(scope="module")
def rectangles():
    parser = Rectangles()
    parser.feed(flame.page("Time of a step", {"decode-b4-q4": STEP}))
    assert not parser.open
    return {text: (title, left, width, top) for text, title, left, width, top in parser.found}


def test_widths_are_shares_of_the_step(rectangles):
    assert {text: width for text, (_, _, width, _) in rectangles.items()} == {
        "decode-b4-q4 8.00": 100, "full_attention 5.00": 62.5, "HcomAllReduce 3.00": 37.5, "collectives 3.00": 37.5, "MatMul 2.00": 25,
        "memory 1.50": 18.75, "launch 0.50": 6.25, "waiting 2.00": 25, "<epilogue> 1.00": 12.5, "Cast 1.00": 12.5, "launch 1.00": 12.5,
    }  # fmt: skip
    title = rectangles["MatMul 2.00"][0]
    assert title == "MatMul: 2.000 ms, 25.0% of the step\n4 launches, 2.0 MB of HBM, 0.0 MB received"


def test_parts_lie_below_their_whole_and_do_not_overlap(rectangles):
    rows = {}
    for _, left, width, top in rectangles.values():
        rows.setdefault(top, []).append((left, left + width))
    assert len(rows) == 4
    for row in rows.values():
        row.sort()
        assert all(end <= start + 1e-6 for (_, end), (start, _) in itertools.pairwise(row))
    tops = sorted(rows)
    for above, below in itertools.pairwise(tops):
        assert all(any(a <= left and right <= b + 1e-6 for a, b in rows[above]) for left, right in rows[below])


def test_streams_of_one_body_of_each_kind_are_drawn_beside_each_other() -> None:
    launches = [
        Lasting(f"layer{i:02}_moe", kind, stream, 10 * i + start, 10 * i + end, cause)
        for i in range(3)
        for kind, stream, start, end, cause in (
            *(("MatMul", "", 0.0, 4.0, "matrix"), ("Dispatch", "exchange", 1.0, 3.0, "collectives")),
            ("MatMul", "", 4.0, 8.0, "matrix"),
        )
    ]
    parser = Rectangles()
    parser.feed("<html>" + flame.streams([*launches, Lasting("layer03_dense", "MatMul", "", 30.0, 31.0, "matrix")]) + "</html>")
    assert [(text, left, width, top) for text, _, left, width, top in parser.found] == [
        ("MatMul", 0, 50, 0),
        ("Dispatch", 12.5, 25, 28),
        ("MatMul", 50, 50, 0),
    ]
    assert parser.found[1][1] == "Dispatch on exchange: 1.000 to 3.000 ms"
    assert flame.streams(launches[:1]) == ""


def test_the_page_stands_alone_in_light_and_dark():
    page = flame.page("a & b", {"decode-b4-q4": STEP})
    assert not re.search(r"https?:|src=|@import|url\(", page)
    assert "prefers-color-scheme:dark" in page
    assert "<title>a &amp; b</title>" in page
    assert "&lt;epilogue&gt;" in page
