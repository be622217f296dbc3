"""tools/advisor/launch_lines/facts.py: sizes are those that the engines derive."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npucompile.tools.advisor.launch_lines.facts import LaunchFacts, sglang_series, vllm_series


@given(st.integers(1, 64), st.integers(1, 16))
def test_a_mesh_has_the_ranks_of_its_engine(tp, dp):
    vllm = LaunchFacts("vllm", {"vllm_tp": tp, "vllm_dp": dp}).mesh
    replicas = LaunchFacts("sglang", {"sglang_tp": tp, "sglang_dp": dp}).mesh
    attention = LaunchFacts("sglang", {"sglang_tp": tp * dp, "sglang_dp": dp, "dp_attention": True}).mesh
    newer = LaunchFacts("sglang", {"sglang_tp": tp * dp, "attention_dp": dp}).mesh
    assert str(vllm) == str(replicas) == str(attention) == str(newer) == f"dp={dp},tp={tp}"


@given(st.integers(1, 600), st.booleans())
def test_series_increase_up_to_the_largest(most, speculates):
    for series in (sglang_series(most, speculates), sglang_series(most, speculates, exact=True)):
        assert list(series) == sorted(set(series))
        assert (series[0], series[-1]) == (1, most)
    assert sglang_series(most, speculates, exact=True) == tuple(range(1, most + 1))
    captured = vllm_series(most)
    assert list(captured) == sorted(set(captured))
    assert captured[-1] == min(most, 512)


def test_series_are_those_of_the_releases():
    assert sglang_series(24, speculates=False) == (1, 2, 4, 8, 12, 16, 24)
    assert sglang_series(12, speculates=True) == (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)
    assert vllm_series(30) == (1, 2, 4, 8, 16, 24, 30)


def test_captured_tokens_are_requests_and_their_drafts():
    values = {
        "speculative_config": {"num_speculative_tokens": 3},
        "compilation_config": {"cudagraph_capture_sizes": [4, 8, 10, 64]},
        "vllm_requests": 8,
    }
    assert LaunchFacts("vllm", values).buckets == (1, 2, 3)
    assert LaunchFacts("vllm", {"vllm_requests": 8}).buckets == (1, 2, 4, 8)
    assert LaunchFacts("vllm", {}).buckets == ()


@pytest.mark.parametrize(
    ("values", "drafts"),
    [
        ({"speculation": "NEXTN", "speculative_steps": 2}, 2),
        ({"speculation": "NEXTN", "draft_tokens": 4}, 3),
        ({"speculation": "EAGLE3"}, 3),
        ({"speculative_steps": 5}, 0),
    ],
)
def test_drafts_are_one_fewer_than_verified(values, drafts):
    assert LaunchFacts("sglang", values).drafts == drafts


def test_requests_of_all_groups_are_shared_by_them():
    values = {"sglang_requests": 50, "sglang_tp": 16, "sglang_dp": 8, "dp_attention": True}
    assert LaunchFacts("sglang", values).group_requests == 7
    assert LaunchFacts("vllm", {"vllm_requests": 50, "vllm_dp": 8}).group_requests == 50


@pytest.mark.parametrize(
    ("values", "role"),
    [
        ({"disaggregation": "prefill"}, "prefill"),
        ({"disaggregation": "null"}, "mixed"),
        ({"kv_transfer": {"kv_role": "kv_consumer"}}, "decode"),
        ({"kv_transfer": {"kv_role": "kv_both"}}, "mixed"),
    ],
)
def test_roles(values, role):
    assert LaunchFacts("vllm", values).role == role
