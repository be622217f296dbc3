"""tools/advisor/plan/prefill.py: what a prefill step's time does when prompts change."""

from __future__ import annotations

import pytest

from npucompile.tools.advisor.plan.parameters import fitted
from npucompile.tools.advisor.plan.prefill import prefill_time, weights_bytes
from npucompile.tools.advisor.plan.published import case_of


@pytest.mark.parametrize("name", ["dsr1-a3x8-mix-2k-2k-50ms", "qwen3-32b-a3x2-mix-2k-2k-50ms", "qwen35-397b-a3x8-in16k-out1k-50ms"])
def test_tokens_cost_time_and_cached_ones_less(name: str) -> None:
    seconds = prefill_time(case_of(name).decode, fitted())
    assert seconds(1, 1, 1000, 0) < seconds(1, 1, 4000, 0) < seconds(2, 2, 4000, 0)
    assert seconds(1, 1, 400, 3600) < seconds(1, 1, 4000, 0)
    # Halves of a prompt, one after the other, compute what the whole does.
    assert seconds(1, 1, 16000, 0) < seconds(1, 1, 8000, 0) + seconds(1, 1, 8000, 8000)


def test_a_short_prompt_reads_all_weights():
    system = case_of("qwen3-32b-a3x2-mix-2k-2k-50ms").decode
    floor = weights_bytes(system) / (1.6e12 * fitted().memory)
    assert prefill_time(system, fitted())(1, 1, 1, 0) >= floor


def test_other_groups_cost_experts_only():
    spread = prefill_time(case_of("qwen3-235b-a3x8-mix-2k-2k-50ms").decode, fitted())
    assert spread(1, 1, 2000, 0) < spread(1, 16, 2000, 0)
    dense = prefill_time(case_of("qwen3-32b-a3x2-mix-2k-2k-50ms").decode, fitted())
    assert dense(1, 1, 2000, 0) == dense(1, 4, 2000, 0)
