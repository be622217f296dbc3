"""tools/advisor/launch_lines/commands.py: builds that are one, and dp groups that may be servers of their own."""

from __future__ import annotations

import shlex

import pytest
from support import tiny

from npucompile.tools.advisor.launch_lines.commands import build_commands, place_of
from npucompile.tools.advisor.launch_lines.imported import import_text
from npucompile.tools.advisor.launch_lines.proposal import Proposal
from npucompile.tools.builder import plan as planning
from npucompile.tools.commands import serve

ROW = {"deployment": "dsr1-a3x16-pd-2k-2k-50ms"}


def proposal(**arguments: str) -> Proposal:
    return Proposal("deepseek-r1", True, ROW | arguments, "ascend-a3")


def test_both_phases_are_one_build_where_nothing_else_differs():
    base = "npucompile build deepseek-r1 --deployment dsr1-a3x16-pd-2k-2k-50ms"
    pair = [proposal(phase="prefill"), proposal(phase="decode")]
    assert build_commands(pair) == [base] * 2
    assert [place_of(each) for each in pair] == ["deepseek-r1-prefill", "deepseek-r1-decode"]
    named = [proposal(phase="prefill", out="a-prefill"), proposal(phase="decode", out="a-decode")]
    assert build_commands(named) == [f"{base} --out a"] * 2
    assert build_commands(pair[:1]) == [f"{base} --phase prefill"]
    differ = [pair[0], proposal(phase="decode", dtype="bfloat16")]
    assert build_commands(differ) == [f"{base} --phase prefill", f"{base} --phase decode --dtype bfloat16"]


def test_groups_that_share_nothing_may_be_servers_of_their_own():
    text = "vllm serve Qwen/Qwen3.5-27B-w8a8 -tp 2 -dp 3 --max-num-seqs 32 --max-model-len 8192 --host 0.0.0.0 --port 9000"
    text = f"TASK_QUEUE_ENABLE=1 {text} --served-model-name q"
    (role,) = import_text(text).roles
    made, *lines, router = role.replicas
    options = tiny.options_of(shlex.split(made)[2:])
    assert planning.plan(options).mesh.size == 2
    whole = role.proposal.plan
    assert planning.plan(options).limits == whole.limits
    for number, line in enumerate(lines):
        queue, variable, *words = shlex.split(line)
        assert queue == "TASK_QUEUE_ENABLE=1"
        assert variable == f"ASCEND_RT_VISIBLE_DEVICES={2 * number},{2 * number + 1}"
        assert words[:3] == ["npucompile", "serve", shlex.split(made)[-1]]
        params = serve.command.make_context("serve", words[2:]).params
        assert (params["port"], params["host"], params["names"]) == (9001 + number, "127.0.0.1", ("q",))
        assert f"http://127.0.0.1:{9001 + number}" in shlex.split(router)
    assert len(lines) == 3
    assert router.endswith("--policy cache_aware --health-check-endpoint /ready --host 0.0.0.0 --port 9000")
    assert role.serve.startswith("TASK_QUEUE_ENABLE=1 npucompile serve qwen3.5-27b ")


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve qwen3.5-27b -tp 4 --max-num-seqs 8 --max-model-len 4096",
        "vllm serve qwen3.5-397b -tp 2 -dp 8 --max-num-seqs 8 --max-model-len 4096",
        "vllm serve qwen3.5-27b -tp 8 -dp 4 -dpl 2 --max-num-seqs 8 --max-model-len 4096",
        """vllm serve qwen3.5-27b -tp 2 -dp 8 --max-num-seqs 8 --max-model-len 4096 --kv-transfer-config '{"kv_role": "kv_producer"}'""",
    ],
)
def test_others_may_not(text):
    (role,) = import_text(text).roles
    assert role.proposal.plan is not None
    assert role.replicas == ()
