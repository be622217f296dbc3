"""tools/advisor/plan/traffic.py: lengths, histograms and traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.graphs.errors import SpecError
from npucompile.tools.advisor.plan.traffic import lengths, of_lengths, of_trace, share, shortened


@given(st.dictionaries(st.integers(1, 5000), st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 300))
def test_a_histogram_is_met_within_one(weights: dict[int, int], count: int) -> None:
    drawn = lengths(",".join(f"{size}:{weight}" for size, weight in weights.items()), "--input", count)
    assert len(drawn) == count
    for size, weight in weights.items():
        assert abs(drawn.count(size) - count * weight / sum(weights.values())) <= 1


@pytest.mark.parametrize("text", ["", "0", "12:", "12:-1", "a", "5:1,5:2", "3;4"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match="--input"):
        lengths(text, "--input", 10)


def test_a_trace_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 5000, "input_length": 7, "output_length": 2}, {"timestamp": 3000, "input_length": 9, "output_length": 4}]
    file.write_text("\n".join(map(json.dumps, rows)))
    work = of_trace(file, None)
    assert (work.inputs, work.outputs, work.arrivals, work.concurrency) == ((9, 7), (4, 2), (0.0, 2.0), 2)
    file.write_text(json.dumps(rows[0]) + "\n{}\n")
    with pytest.raises(SpecError, match=r"trace\.jsonl:2 is no request"):
        of_trace(file, None)
    file.write_text("\n")
    with pytest.raises(SpecError, match="has no requests"):
        of_trace(file, None)


def test_instances_share_and_waves_shorten():
    work = of_lengths("10", "5", 4, None, None, 0)
    assert (work.requests, share(work, 2).requests, share(work, 2).concurrency, shortened(work, 1).requests) == (16, 8, 2, 4)
    with pytest.raises(SpecError, match="--shared-prefix 10"):
        of_lengths("10", "5", 4, None, None, 10)
    with pytest.raises(SpecError, match="0 requests"):
        of_lengths("10", "5", 4, 0, None, 0)


def test_a_trace_may_have_priorities(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    row = {"input_length": 7, "output_length": 2}
    rows = [row | {"timestamp": 9, "priority": -4}, row | {"timestamp": 3}, row | {"timestamp": 5, "priority": None}]
    file.write_text("\n".join(map(json.dumps, rows)))
    work = of_trace(file, None)
    assert work.priorities == (0, 0, -4)
    assert (share(work, 2).priorities, shortened(work, 1).priorities) == ((0, -4), (0, 0, -4))
    for wrong in (1001, 0.5, True, "high"):
        file.write_text(json.dumps(row | {"timestamp": 3, "priority": wrong}))
        with pytest.raises(SpecError, match=r"trace\.jsonl:1 has priority .*; legal is an integer from -1000 to 1000"):
            of_trace(file, None)
    file.write_text(json.dumps(row | {"timestamp": 3}))
    assert of_trace(file, None).priorities == ()
