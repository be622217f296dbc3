"""tools/advisor/launch_lines/proposal.py: a build of a line's own sizes is legal, and says what the line did not say."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny

from npucompile.models import registry
from npucompile.server.guard.limits import SocketLimits
from npucompile.tools.advisor.launch_lines.facts import LaunchFacts
from npucompile.tools.advisor.launch_lines.proposal import options_of, propose

MODELS = [name for name in registry.presets() if name not in ("qwen3.5-tiny",)]


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(MODELS),
    st.integers(1, 4096),
    st.integers(1, 300_000),
    st.integers(0, 3),
    st.integers(1, 65536),
    st.sampled_from(["mixed", "prefill", "decode"]),
)
def test_every_proposal_has_a_plan_and_is_planned_where_a_rank_can_hold_it(model, requests, context, drafts, chunk, role):
    values = {
        "model": model,
        "sglang_tp": 1,
        "sglang_requests": requests,
        "context": context,
        "sglang_chunk": chunk,
        "disaggregation": role,
    }
    values |= {"speculation": "NEXTN", "speculative_steps": drafts} if drafts else {}
    proposal = propose(LaunchFacts("sglang", values))
    assert proposal.plan is not None
    assert proposal.planned == (proposal.problem == "") == proposal.memory.fits
    assert proposal.plan.limits.max_model_len <= max(context, 128)
    assert proposal.plan.limits.drafts in (0, drafts)
    # Cached tokens are reduced to what a rank has memory for, so that only those of one request can be too many.
    assert proposal.planned or proposal.plan.limits.num_pages - 1 == proposal.plan.limits.pages_per_request
    assert options_of(proposal).model == model
    # Clients of the line open a connection for each request that it runs.
    assert SocketLimits().connections(proposal.plan.limits.num_request_slots - 1)[1] >= requests


def test_what_a_line_does_not_say_is_said():
    proposal = propose(LaunchFacts("vllm", {"model": "/models/Qwen3-32B-w8a8", "vllm_tp": 4, "vllm_requests": 16}))
    assumed = "\n".join(proposal.assumed)
    assert "model qwen3-32b, by the name of /models/Qwen3-32B-w8a8" in assumed
    assert "target ascend-a3: 4 NPUs on a machine may be an A2 too" in assumed
    assert "context: the line names none, which means the model's own, 40960 tokens" in assumed
    assert propose(LaunchFacts("vllm", {"model": "x", "vllm_tp": 16})).target == "ascend-a3"
    assert propose(LaunchFacts("vllm", {"model": "x"}), target_name="ascend-a2").target == "ascend-a2"


def test_a_checkpoint_that_is_here_is_built_itself(tmp_path):
    model = tiny.write_checkpoint(tmp_path / "Qwen3.5-397B", **tiny.NPU_SIZES)
    proposal = propose(LaunchFacts("sglang", {"model": str(model), "sglang_tp": 2, "sglang_requests": 4, "quantization": "modelslim"}))
    assert (proposal.model, proposal.known, proposal.problem) == (str(model), True, "")
    assert "quantization" not in proposal.arguments
    assert proposal.arguments["max-model-len"] == "1024"


def test_heads_need_not_divide_and_the_pool_is_bounded_by_one_option_alone():
    values = {"model": "qwen3-32b", "vllm_tp": 3, "vllm_requests": 400}
    for asked in (8 << 30, 400 << 30):
        proposal = propose(LaunchFacts("vllm", {**values, "pool_bytes": asked}))
        assert proposal.problem == ""
        assert len({"kv-cache-memory", "max-total-tokens"} & set(proposal.arguments)) == 1
    assert proposal.plan.mesh.axis("tp") == 3
    assert "--max-total-tokens" in proposal.words


@pytest.mark.parametrize(
    ("values", "argument"),
    [
        ({"speculation": "EAGLE3", "speculative_steps": 3}, "qwen3-32b-eagle3"),
        ({}, None),
    ],
)
def test_an_eagle_head_is_the_preset_for_its_model(values, argument):
    proposal = propose(LaunchFacts("sglang", {"model": "qwen3-32b", "sglang_tp": 4, "sglang_requests": 4, **values}))
    assert proposal.arguments.get("draft-model") == argument
    assert proposal.problem == ""


def test_a_model_that_nobody_knows_has_no_plan_and_keeps_its_name():
    proposal = propose(LaunchFacts("vllm", {"model": "acme/other-7b", "vllm_tp": 2}))
    assert (proposal.known, proposal.plan, proposal.words[0]) == (False, None, "acme/other-7b")
    assert "say which with --model" in proposal.assumed[0]
    assert propose(LaunchFacts("vllm", {"model": "acme/other-7b", "vllm_tp": 2}), model="qwen3-8b").plan is not None
