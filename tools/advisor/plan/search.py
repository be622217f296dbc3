"""Searches the layouts of a model for the one that serves most within a target."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ....graphs.errors import SpecError
from .candidates import Candidate, Question, candidates
from .decode import decode_parts
from .parameters import PlanParameters
from .predict import Prediction, predict
from .prefill import prefill_time
from .traffic import shortened

SHORT_WAVES = 2
"""Waves that all candidates are simulated with; the best are simulated whole."""
KEPT = 10
_SLACK = 0.15
"""By how much the estimate may be over the target before a candidate is put behind."""
_FINALISTS = 16
_GAPS = (2, 4, 8)
"""Targets for the gap between tokens that are tried, over the gap that 99 of 100 stay below without any."""
SIMULATED = 160
"""Candidates that are simulated: those that the estimate puts first."""


@dataclass(frozen=True)
class Found:
    """A candidate and its prediction.

    Attributes:
        output_tok_s: of all instances.
    """

    candidate: Candidate
    prediction: Prediction
    output_tok_s: float
    meets: bool


@dataclass(frozen=True)
class PlanAnswer:
    """The best candidates, best first, how many were tried, and how many of those were simulated."""

    best: Sequence[Found]
    tried: int
    simulated: int

    @property
    def meets(self) -> bool:
        """Whether any meets the target."""
        return any(found.meets for found in self.best)


def search(question: Question, parameters: PlanParameters) -> PlanAnswer:
    """The best candidates: those that meet the target by throughput, then those that come closest to it.

    Raises:
        SpecError: no layout holds weights and one request.
    """
    every = list(candidates(question))
    if not every:
        raise SpecError(
            f"{question.model} on {question.npus} NPUs of {question.target}: no layout of {', '.join(question.schemes)} holds its weights "
            "and one request of the longest prompt and output; legal are more NPUs, narrower weights or shorter requests"
        )
    tried = sorted(every, key=lambda candidate: estimate(question, candidate, parameters))[:SIMULATED]
    found = [_found(question, each, parameters, SHORT_WAVES) for each in tried]
    finalists = _distinct(_ranked(question, found))[:_FINALISTS]
    whole = [_found(question, each.candidate, parameters, None) for each in finalists]
    whole += [_found(question, each, parameters, None) for found in whole for each in _with_gaps(question, found)]
    return PlanAnswer(_ranked(question, whole)[:KEPT], len(every), len(tried))


def estimate(question: Question, candidate: Candidate, parameters: PlanParameters) -> tuple[float, float]:
    """How far a candidate is over the target, and tokens/s with a minus: what it would do without queues, drains and padding.

    A request takes its share of decode steps and of prefill steps, which follow one another on one instance and overlap on several.
    """
    case = candidate.case
    work, layout = case.workload, case.decode.layout
    batch = max(min(case.serving.max_running, -(-work.concurrency // layout.dp)), 1)
    context = work.mean_input + work.mean_output / 2
    step = sum(float(part) for part in decode_parts(case.decode, parameters, batch, context).values())
    running = min(batch * layout.dp, work.concurrency)
    decoding = step * work.mean_output / case.accepted / running
    system, serving = case.prefill or case.decode, case.prefill_serving or case.serving
    new = work.mean_input - work.cached
    chunk = serving.chunk or serving.budget
    passes = max(math.ceil(new / chunk), 1)
    groups = system.layout.dp
    seconds = prefill_time(system, parameters)(1, groups, round(min(chunk, new)), round(work.mean_input / 2 if passes > 1 else work.cached))
    prefilling = seconds * passes / min(groups * system.layout.instances, max(work.concurrency, 1))
    if case.prefill is None:
        request, token = decoding + prefilling, (decoding + prefilling) * running / work.mean_output
    else:
        request, token = max(decoding, prefilling), step / case.accepted
    over = max(token * 1e3 / question.tpot_ms - 1 - _SLACK, 0.0) if question.tpot_ms else 0.0
    return over, -work.mean_output * candidate.share / request


def _found(question: Question, candidate: Candidate, parameters: PlanParameters, waves: int | None) -> Found:
    case = candidate.case if waves is None else replace(candidate.case, workload=shortened(candidate.case.workload, waves))
    prediction = predict(case, parameters)
    tpot, ttft = prediction.tpot_ms.mean, prediction.ttft_ms.mean
    meets = (question.tpot_ms is None or tpot <= question.tpot_ms) and (question.ttft_ms is None or ttft <= question.ttft_ms)
    return Found(candidate, prediction, prediction.output_tok_s * candidate.share, meets)


def _with_gaps(question: Question, found: Found) -> list[Candidate]:
    """A candidate that misses the target for first tokens alone, with servers that let more prefill steps between two decode steps."""
    case, prediction = found.candidate.case, found.prediction
    slow = question.tpot_ms is not None and prediction.tpot_ms.mean > question.tpot_ms
    if found.meets or slow or question.ttft_ms is None or case.prefill is not None or question.itl_target_ms is not None:
        return []
    targets = [float(math.ceil(factor * prediction.itl_ms.p99)) for factor in _GAPS]
    return [replace(found.candidate, case=replace(case, serving=replace(case.serving, itl_target_ms=each))) for each in targets]


def excess(question: Question, found: Found) -> float:
    """By which factor the worse of both targets is missed; at most 1 where both are met."""
    parts = [1.0]
    if question.tpot_ms:
        parts.append(found.prediction.tpot_ms.mean / question.tpot_ms)
    if question.ttft_ms:
        parts.append(found.prediction.ttft_ms.mean / question.ttft_ms)
    return max(parts)


def _ranked(question: Question, found: Iterable[Found]) -> list[Found]:
    return sorted(found, key=lambda each: (excess(question, each), -each.output_tok_s, each.candidate.label))


def _distinct(ranked: Iterable[Found]) -> list[Found]:
    """The best of each group of candidates that differ only in settings of prefill, such as its chunk."""
    best: dict[object, Found] = {}
    for layout in ranked:
        case = layout.candidate.case
        best.setdefault((case.decode, case.prefill, layout.candidate.share, case.serving.max_running), layout)
    return list(best.values())
