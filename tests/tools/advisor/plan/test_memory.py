"""tools/advisor/plan/memory.py: near what a build plans, and room for what is published."""

from __future__ import annotations

import pytest

from npucompile.tools.advisor.plan.memory import fixed_bytes, pool_tokens, request_bytes, token_bytes
from npucompile.tools.advisor.plan.published import case_of, ids
from npucompile.tools.builder.memory import GIB
from npucompile.tools.builder.plan import Options, plan


@pytest.mark.parametrize("name", ["qwen35-397b-a3x8-in3k5-out1k5-50ms", "dsr1-a3x8-mix-2k-2k-50ms", "qwen3-235b-a3x8-mix-2k-2k-50ms"])
def test_weights_are_those_that_a_build_plans(name: str) -> None:
    case = case_of(name)
    planned = plan(Options(case.decode.shape.name, deployment=name))
    assert sum(fixed_bytes(case.decode).values()) / GIB == pytest.approx(planned.params_bytes / GIB, rel=0.12)


@pytest.mark.parametrize("name", ids())
def test_published_requests_fit(name: str) -> None:
    case = case_of(name)
    work = case.workload
    each = work.inputs[0] + work.outputs[0] - work.cached
    running = min(case.serving.max_running, -(-work.concurrency // (case.decode.layout.dp * case.decode.layout.instances)))
    room = pool_tokens(case.decode, case.serving) / (work.cached + each * running)
    # Nobody publishes memory; the row of sparse attention, whose lengths exceed its name, is 6 % short.
    assert room >= (0.98 if case.decode.shape.indexer is None else 0.93)


def test_caches_of_a_token_and_a_request():
    latent = case_of("dsr1-a3x8-mix-2k-2k-50ms").decode
    assert token_bytes(latent) == 62 * 1152
    hybrid = case_of("qwen35-397b-a3x8-in3k5-out1k5-50ms").decode
    assert token_bytes(hybrid) == 16 * 2 * 1 * 256 * 2
    assert request_bytes(hybrid) == 45 * 64 * 128 * 128 * 2 / 2 * 5
