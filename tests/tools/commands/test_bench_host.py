"""`npucompile bench host`: the whole server is measured, in one process and in several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from support import ranks

from npucompile.tools.cli import main
from npucompile.tools.commands import bench_host

NUMBERS = ("median_step_ms", "device_busy", "tok_s", "engine_ms_a_step", "door_ms_a_step", "door_us_a_token")


def measured(home: Path, *options: object) -> Any:
    process = ranks.spawn(ranks.command("bench", "host", "--streams", 6, "--groups", 2, *options), ranks.environment(home))
    status, out, errors = ranks.finished(process, 300)
    assert status == 0, errors
    return out


@pytest.mark.parametrize(("api_servers", "http"), [(0, False), pytest.param(1, False, marks=pytest.mark.long), (2, True)])
def test_all_tokens_are_streamed_and_the_figures_agree(tmp_path: Path, api_servers: int, http: bool) -> None:
    options = ("--step-ms", 20, "--tokens", 32, "--rounds", 2, "--api-servers", api_servers, *(["--http"] if http else []), "--json")
    found = json.loads(measured(tmp_path, *options))
    assert (found["streams"], found["groups"], found["api_servers"], found["http"], found["rounds"]) == (6, 2, api_servers, http, 2)
    assert found["median_step_ms"] >= 20 * 0.99
    # Spreads are of rounds, and medians of two are between them.
    for name in NUMBERS:
        low, high = found["ranges"][name]
        assert 0 < low <= found[name] <= high
    # Three tokens of a stream a step at most, and a prefill step before.
    assert found["tok_s"] <= 6 * 3 / 0.02


def test_figures_are_lines_with_their_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {**dict.fromkeys(NUMBERS, 2.0), "ranges": {name: [1.0, 3.0] for name in NUMBERS}}
    monkeypatch.setattr(bench_host, "measure", lambda *_, **__: found)
    lines = CliRunner().invoke(main, ["bench", "host"]).stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [[name, "2.00"] for name in NUMBERS]
    assert all(line.endswith("(1.00..3.00)") for line in lines)
