"""tools/quantize/report.py: errors are relative, the worst come first, and experts are one matrix."""

from __future__ import annotations

import pytest

from npucompile.tools.quantize.report import ErrorSums, summary, table

LAYER = "model.layers.{}.mlp.{}"


def sums() -> ErrorSums:
    errors = ErrorSums()
    for change in (0.3, 0.1):
        errors.add(LAYER.format(3, "experts.down_proj"), "w4a8_dynamic", 16 * change**2, 16.0, 32, 8)
    errors.add("mtp.layers.0.self_attn.q_proj", "w8a8_dynamic", 16 * 0.01**2, 16.0, 32, 16)
    errors.add("model.layers.0.self_attn.q_proj", "w8a8_dynamic", 0.0, 0.0, 32, 16)
    return errors


def test_the_worst_come_first():
    worst, middle, none = sums().errors()
    assert (worst.relative_rms, worst.worst) == (pytest.approx(0.05**0.5), pytest.approx(0.3))
    assert (worst.layer, worst.kind, worst.float_bytes, worst.bytes) == (3, "mlp.experts.down_proj", 64, 16)
    assert (middle.relative_rms, middle.layer, middle.kind) == (pytest.approx(0.01), 0, "mtp.self_attn.q_proj")
    assert (none.relative_rms, none.kind) == (0.0, "self_attn.q_proj")
    assert none.as_dict()["format"] == "w8a8_dynamic"


def test_a_table_is_cut_and_says_so():
    lines = table(sums().errors(), rows=2)
    assert lines[0].split() == ["matrix", "format", "error"]
    assert lines[1].split()[::2] == ["model.layers.3.mlp.experts.down_proj", f"{sums().errors()[0].relative_rms:.2%}"]
    assert lines[3] == "and 1 with smaller errors (--json lists all)"
    assert len(table(sums().errors())) == 4
    assert table([]) == []


def test_a_summary_has_a_line_for_each_format():
    int4, int8 = summary(sums().errors())
    assert int4.startswith("w4a8_dynamic: 1 matrices, error up to 22.")
    assert int8 == "w8a8_dynamic: 2 matrices, error up to 1.00%, 0.0 -> 0.0 MB"
