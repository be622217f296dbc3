"""tools/advisor/plan/recipe.py: the printed command is one that `npucompile build` takes, with the sizes of the candidate."""

from __future__ import annotations

import shlex

import pytest

from npucompile.tools.advisor.plan.candidates import Question, schemes_of
from npucompile.tools.advisor.plan.parameters import fitted
from npucompile.tools.advisor.plan.recipe import command_of, options_of, refusal, serve_command, serve_commands
from npucompile.tools.advisor.plan.search import search
from npucompile.tools.advisor.plan.shape import shape_of
from npucompile.tools.advisor.plan.system import PlannedServing, Workload
from npucompile.tools.advisor.plan.traffic import of_lengths
from npucompile.tools.builder.plan import Options, plan
from npucompile.tools.builder.targets import target as machine_target
from npucompile.tools.commands.build import command as build
from npucompile.tools.commands.serve import command as serve


@pytest.mark.parametrize(
    ("model", "npus", "target"),
    [("qwen3-32b", 4, "ascend-a3"), ("deepseek-r1", 48, "ascend-a3"), ("qwen3.5-397b", 16, "ascend-a2"), ("qwen3-30b-a3b", 2, "ascend-a3")],
)
def test_the_command_is_legal_and_says_what_the_candidate_is(model: str, npus: int, target: str) -> None:
    work = of_lengths("2000", "500", 16, 32, None, 0)
    asked = Question(model, shape_of(model), target, npus, work, schemes=schemes_of(model))
    best = search(asked, fitted()).best
    split = next((found for found in best if found.candidate.case.prefill), None)
    for found in [best[0], *([split] if split else [])]:
        every = options_of(asked, found)
        assert not refusal(every)
        assert len(every) == (2 if found.candidate.case.prefill else 1)
        case = found.candidate.case
        parts = [(case.decode.layout, 1), *([(case.prefill.layout, case.prefill.layout.instances)] if case.prefill else [])]
        started = serve_commands(asked, found.candidate)
        node = machine_target(target).npus_per_node
        assert len(started) == sum(-(-layout.ranks // node) * instances for layout, instances in parts)
        roles = [serve.make_context("serve", shlex.split(line)[2:]).params["role"] for line in started]
        assert set(roles) == ({"prefill", "decode"} if case.prefill else {"both"})
        for options in every:
            words = shlex.split(command_of(options))
            assert words[:2] == ["npucompile", "build"]
            parsed = build.make_context("build", words[2:]).params
            kept = {name: value for name, value in parsed.items() if name not in ("out", "precompile", "jobs", "nice")}
            planned = plan(Options(**kept))
            assert planned == plan(options)
            assert planned.limits.num_request_slots - 1 == options.max_num_seqs
        layout = found.candidate.case.decode.layout
        assert (planned.mesh.axis("dp"), planned.mesh.axis("tp")) == (layout.dp, layout.tp)
        assert max(b.batch for b in planned.buckets if b.kind == "decode") == found.candidate.case.serving.max_running


def test_what_a_build_refuses_is_said():
    options = Options("qwen3-32b", target="ascend-a3", mesh="dp=1,tp=24")
    assert "legal is a tp that divides 16" in refusal([options])
    crowded = Options(
        "qwen3-32b", target="ascend-a3", mesh="dp=1,tp=2", quantization="w8a8", max_model_len=40960, max_num_seqs=30, buckets=(30,)
    )
    assert "left for activations" in refusal([crowded])


def test_the_server_is_what_was_simulated():
    work = Workload((5, 5), (5, 5), 2, priorities=(0, -3))
    assert serve_command("qwen3-32b", PlannedServing(), Workload((5, 5), (5, 5), 2, priorities=(0, 3))) == "npucompile serve qwen3-32b"
    command = serve_command("an artifact", PlannedServing(itl_target_ms=62.5), work)
    assert command == "npucompile serve 'an artifact' --itl-target 62.5 --min-priority -3"
