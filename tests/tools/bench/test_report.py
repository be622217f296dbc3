from __future__ import annotations

import json

from npucompile.tools.bench.report import Column, ReportTable, as_data, as_markdown, as_text, cell
from npucompile.tools.bench.stats import Spread

TABLE = ReportTable(
    "decode",
    "Decode step time",
    (Column("bucket", "bucket"), Column("step_ms", "step ms", 1), Column("rows", "rows", 0)),
    (
        {"bucket": "a", "step_ms": Spread(2.0, 1.5, 1234.56, 3), "rows": 4},
        {"bucket": "longer|name", "rows": 16},
    ),
    ("first note", "second"),
)


def test_text_is_aligned() -> None:
    assert as_text(TABLE) == (
        "Decode step time\n"
        "\n"
        "  bucket                  step ms  rows\n"
        "  a            2.0 (1.5..1,234.6)     4\n"
        "  longer|name                   -    16\n"
        "\n"
        "  first note\n"
        "  second\n"
    )


def test_markdown_holds_the_same_cells() -> None:
    assert as_markdown(TABLE) == (
        "**Decode step time**\n"
        "\n"
        "| bucket | step ms | rows |\n"
        "| --- | ---: | ---: |\n"
        "| a | 2.0 (1.5..1,234.6) | 4 |\n"
        "| longer\\|name | - | 16 |\n"
        "\n"
        "- first note\n"
        "- second\n"
    )


def test_data_keeps_every_digit_and_says_what_was_not_measured() -> None:
    data = json.loads(json.dumps(as_data(TABLE)))
    assert data["rows"][0] == {"bucket": "a", "step_ms": {"median": 2.0, "low": 1.5, "high": 1234.56, "count": 3}, "rows": 4}
    assert data["rows"][1] == {"bucket": "longer|name", "step_ms": None, "rows": 16}
    assert (data["figure"], data["notes"]) == ("decode", ["first note", "second"])


def test_a_single_measurement_has_no_spread() -> None:
    assert cell(Spread(3.14159, 3.14159, 3.14159, 1), 2) == "3.14"
