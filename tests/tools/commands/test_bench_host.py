"""`npucompile bench host`: the whole server is measured, in one process and in two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import ranks

NUMBERS = ("median_step_ms", "device_busy", "tok_s", "engine_ms_a_step", "door_ms_a_step")


def measured(home: Path, *options: object) -> Any:
    process = ranks.spawn(ranks.command("bench", "host", "--streams", 6, "--groups", 2, *options), ranks.environment(home))
    status, out, errors = ranks.finished(process, 300)
    assert status == 0, errors
    return out


def ranges(found: Any) -> dict[str, tuple[float, float, float]]:
    """Least, median and greatest of each figure."""
    return {name: (found["ranges"][name][0], found[name], found["ranges"][name][1]) for name in NUMBERS}


def read(line: str) -> tuple[float, float, float]:
    """The same of a line."""
    low, high = line.split("(")[1].rstrip(")").replace(",", "").split("..")
    return float(low), float(line.split()[1].replace(",", "")), float(high)


@pytest.mark.parametrize(("api_servers", "as_json"), [(0, True), (1, False)], ids=["one process", "two processes"])
def test_all_tokens_are_streamed_and_the_figures_agree(tmp_path: Path, api_servers: int, as_json: bool) -> None:
    """As JSON of one process, and as lines of two."""
    options = ["--step-ms", 20, "--tokens", 32, "--rounds", 2, "--api-servers", api_servers, *(["--json"] if as_json else [])]
    said = measured(tmp_path, *options)
    if as_json:
        found = json.loads(said)
        assert (found["streams"], found["groups"], found["api_servers"], found["rounds"]) == (6, 2, api_servers, 2)
        figures = ranges(found)
    else:
        figures = {line.split()[0]: read(line) for line in said.splitlines()}
    assert tuple(figures) == NUMBERS
    # Spreads are of rounds, and medians of two are between them.
    assert all(0 < low <= median <= high for low, median, high in figures.values())
    assert figures["median_step_ms"][1] >= 20 * 0.99
    # Three tokens of a stream a step at most, and a prefill step before.
    assert figures["tok_s"][1] <= 6 * 3 / 0.02
