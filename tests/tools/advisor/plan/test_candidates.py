"""tools/advisor/plan/candidates.py: what is tried is what a build takes."""

from __future__ import annotations

import pytest

from npucompile.graphs.types import Mesh
from npucompile.tools.advisor.plan.candidates import Question, candidates, fitting, legal_tp, schemes_of
from npucompile.tools.advisor.plan.memory import pool_tokens
from npucompile.tools.advisor.plan.published import machine_of
from npucompile.tools.advisor.plan.shape import shape_of
from npucompile.tools.advisor.plan.traffic import of_lengths
from npucompile.tools.builder.targets import check_mesh, target


def question(model: str, npus: int, kind: str = "ascend-a3", concurrency: int = 64) -> Question:
    work = of_lengths("3500", "1500", concurrency, None, None, 0)
    return Question(model, shape_of(model), kind, npus, work, schemes=schemes_of(model))


@pytest.mark.parametrize(("model", "npus"), [("qwen3.5-397b", 16), ("deepseek-r1", 32), ("qwen3-32b", 8), ("qwen3-235b-a22b", 32)])
def test_meshes_are_legal_and_requests_fit(model: str, npus: int) -> None:
    every = list(candidates(question(model, npus)))
    assert every
    for candidate in every:
        case = candidate.case
        systems = [case.decode] if case.prefill is None else [case.decode, case.prefill]
        for system in systems:
            check_mesh(target("ascend-a3"), Mesh.parse(f"dp={system.layout.dp},tp={system.layout.tp}"))
        ranks = sum(s.layout.ranks * s.layout.instances for s in systems)
        assert ranks * candidate.share == npus
        longest = 5000
        assert pool_tokens(case.decode, case.serving) >= longest * case.serving.max_running * 0.999
        assert case.serving.max_running <= fitting(case.decode, case.workload)
        assert candidate.chunk % 128 == 0
    assert {candidate.case.decode.drafts for candidate in every} == {0, 1, 2, 3}
    assert any(c.case.prefill for c in every) == (model in ("deepseek-r1", "qwen3-235b-a22b"))
    assert any(candidate.deployment for candidate in every) == (model in ("deepseek-r1", "qwen3-235b-a22b"))


def test_groups_do_not_straddle_slow_links():
    shape, a2, a3 = shape_of("qwen3-32b"), machine_of("ascend-a2"), machine_of("ascend-a3")
    assert not legal_tp(shape, 16, 16, a2)
    assert legal_tp(shape, 16, 16, a3)
    assert not legal_tp(shape, 3, 12, a3)
