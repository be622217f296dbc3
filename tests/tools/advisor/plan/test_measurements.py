"""tools/advisor/plan/measurements.py: only what is published, and true to itself."""

from __future__ import annotations

import pytest

from npucompile.tools.advisor.plan.measurements import facts_of, loads, measured
from npucompile.tools.builder.deployments import deployments


def test_rows_are_rows_of_the_table_name_their_source_and_add_up():
    for name, own in measured().items():
        if name in loads():
            continue
        row = deployments()[name]
        assert facts_of(name)["source"]
        assert row.measured["tpot_ms"] == pytest.approx(own.tpot_ms, rel=0.01)
        assert row.measured["output_tokens_per_s"] == pytest.approx(own.output_tok_s, rel=0.001)
        output = facts_of(name).get("output_len", deployments()[name].output_len)
        assert own.e2e_ms == pytest.approx(own.ttft_ms + own.tpot_ms * (output - 1), rel=0.004), name


def test_loads_are_of_rows_of_the_table_and_say_something():
    assert len(loads()) == 27
    for name, load in loads().items():
        assert load.deployment in deployments(), name
        assert name not in deployments(), name
        assert load.source, name
        assert load.measured.output_tok_s or load.measured.tpot_ms, name
