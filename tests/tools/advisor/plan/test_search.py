"""tools/advisor/plan/search.py: the best of all candidates, and an estimate that knows the simulation's order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from npucompile.tools.advisor.plan import search as searching
from npucompile.tools.advisor.plan.candidates import Question, candidates
from npucompile.tools.advisor.plan.parameters import fitted
from npucompile.tools.advisor.plan.predict import predict
from npucompile.tools.advisor.plan.search import estimate, excess, search
from npucompile.tools.advisor.plan.shape import shape_of
from npucompile.tools.advisor.plan.traffic import of_lengths


def question(npus: int = 4, tpot_ms: float | None = 50, **options) -> Question:
    work = of_lengths("1000", "500", 24, 48, None, 0)
    return Question("qwen3-32b", shape_of("qwen3-32b"), "ascend-a3", npus, work, tpot_ms, **options)


def test_no_candidate_is_better_than_the_best():
    asked = question()
    answer = search(asked, fitted())
    best = answer.best[0]
    assert answer.meets
    assert answer.tried == len(list(candidates(asked)))
    for candidate in list(candidates(asked))[::7]:
        prediction = predict(candidate.case)
        if prediction.tpot_ms.mean <= 50:
            assert prediction.output_tok_s * candidate.share <= best.output_tok_s * 1.001
    order = [(excess(asked, found), -found.output_tok_s) for found in answer.best]
    assert order == sorted(order)


def test_a_target_that_none_meets_ranks_by_distance():
    answer = search(question(tpot_ms=1.0), fitted())
    assert not answer.meets
    tpot = [found.prediction.tpot_ms.mean for found in answer.best]
    assert tpot == sorted(tpot)


def test_the_estimate_orders_as_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = question(tpot_ms=None)
    every = list(candidates(asked))[::5]
    estimated = [-estimate(asked, candidate, fitted())[1] for candidate in every]
    simulated = [predict(candidate.case).output_tok_s * candidate.share for candidate in every]
    ranks = [np.argsort(np.argsort(values)) for values in (estimated, simulated)]
    assert np.corrcoef(*ranks)[0, 1] > 0.9
    monkeypatch.setattr(searching, "SIMULATED", 20)
    assert search(asked, fitted()).simulated == 20


def test_what_misses_first_tokens_alone_is_served_with_a_target_for_gaps():
    work = of_lengths("3000", "200", 40, None, None, 0)
    tight = Question("qwen3-32b", shape_of("qwen3-32b"), "ascend-a3", 2, work, 150.0, drafts=(1,))
    closest = search(replace(tight, ttft_ms=1.0), fitted()).best[0]
    case = closest.candidate.case
    assert case.serving.itl_target_ms is not None
    plain = predict(replace(case, serving=replace(case.serving, itl_target_ms=None)))
    between = (closest.prediction.ttft_ms.mean + plain.ttft_ms.mean) / 2
    assert closest.prediction.ttft_ms.mean < between
    answer = search(replace(tight, ttft_ms=between), fitted())
    assert answer.meets
    assert answer.best[0].candidate.case.serving.itl_target_ms is not None
