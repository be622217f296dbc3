"""tools/advisor/plan/published.py: every row is a case."""

from __future__ import annotations

import pytest

from npucompile.graphs.errors import SpecError
from npucompile.tools.advisor.plan.measurements import measured
from npucompile.tools.advisor.plan.published import case_of, ids, machine_of
from npucompile.tools.builder.deployments import deployments


def test_rows_become_cases_with_what_was_assumed():
    assert len(ids()) == len(deployments())
    for name in ids():
        case = case_of(name)
        assert (case.prefill is not None) == ("prefill" in deployments()[name].phases or name == "dsv32-reference-values")
        if name in measured():
            assert not case.assumed
        elif deployments()[name].input_len is None:
            assert case.assumed


def test_a_load_is_its_deployment_under_other_traffic():
    load, base = case_of("qwen35-397b-sg-64k-20ms"), case_of("qwen35-397b-a3x8-in64k-out1k-20ms")
    assert (str(load.decode.layout), str(base.decode.layout)) == ("dp=1,tp=16", "dp=2,tp=8")
    assert (load.workload.concurrency, load.workload.mean_input, load.serving) == (8, 65536, base.serving)
    other = case_of("qwen36-35b-sg-122")
    assert (other.decode.shape.name, other.decode.scheme.name, other.serving.policy) == ("qwen3.6-35b-a3b", "bf16", "sglang")
    assert other.workload.requests == 4 * 122
    assert len(other.assumed) == 2
    assert case_of("qwen35-397b-va-128k-2").decode.drafts == 5
    assert case_of("qwen35-27b-va-a2-32").decode.machine.name == "ascend-a2"


def test_budgets_are_of_a_group():
    case = case_of("qwen3-480b-a3x8-mix-3.5k-1.5k-50ms")
    assert (case.serving.chunk, case.serving.budget, case.serving.max_running) == (28672 // 4, 28672 // 4, 20)
    assert case_of("dsr1-a3x8-mix-2k-2k-50ms").serving.waits


def test_unknown_machines_are_refused():
    with pytest.raises(SpecError, match="legal are ascend-a3 and ascend-a2"):
        machine_of("cpu")
