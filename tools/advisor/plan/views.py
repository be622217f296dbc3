"""What `npucompile plan` shows: a published row beside its prediction, or the best layouts of a search."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ....graphs.errors import SpecError
from ....graphs.paths import file_named
from ....lowering.artifact.artifact import MANIFEST
from ....models.registry import find
from ...builder.deployments import Deployment, deployment, deployments
from ...builder.targets import target
from . import buckets, pictures, recipe
from .asked import Asked
from .candidates import Question, schemes_of, stored_scheme
from .expert_load import placements
from .listing import as_commands, buildable, commands_of
from .measurements import measured
from .parameters import FILE, PlanParameters, fitted
from .predict import Prediction, predict
from .published import case_of
from .run import LatencySpread, RunLatencies
from .search import Found, PlanAnswer, excess, search
from .shape import shape_of
from .system import LoadCase, Workload
from .tower import tower_cost
from .traffic import of_lengths, of_trace

NPUS_A_CARD = {"ascend-a3": 2, "ascend-a2": 1}


@dataclass(frozen=True)
class PlanResult:
    """A result: as JSON, as text, as a picture.

    Attributes:
        buckets: that were chosen.
        refused: why nothing is good enough; "" where something is.
    """

    data: Mapping[str, Any]
    lines: Sequence[str]
    buckets: Sequence[int]
    draw: Callable[[Path], None] | None = None
    refused: str = ""


def deployment_view(name: str, asked: Asked) -> PlanResult:
    """A published row.

    Raises:
        SpecError: there is none of that id, or the metrics cannot be read.
    """
    parameters, row = _parameters(asked), deployment(name)
    published_case = case_of(name, asked.accepted)
    case = with_traffic(published_case, row, asked)
    prediction = predict(case, parameters)
    lists, published = _lists(prediction, case, asked)
    # A measurement is of the row's own traffic.
    own, work = measured().get(name) if case is published_case else None, case.workload
    chosen = buckets.shortest(lists).buckets if lists else case.decode.buckets
    data = {
        "deployment": name,
        "model": row.model,
        "accepted": case.accepted,
        "predicted": prediction.as_dict(),
        "target_tpot_ms": row.tpot_target_ms,
        "measured": vars(own) if own else None,
        "buckets": {"published": list(case.decode.buckets), "chosen": list(chosen)},
    }
    lines = [
        f"{name}: {row.model}, {work.mean_input:g} tokens in, {work.mean_output:g} out, {work.concurrency} in flight, "
        f"{work.requests} requests",
        *prediction_lines(prediction),
    ]
    if row.pictures and (cost := tower_cost(row.model, row.quantization, case.decode.machine, parameters)):
        lines += cost.lines()
        data["pictures"] = cost.as_dict()
    if asked.expert_map:
        placed = placements(asked.expert_map, case, parameters)
        lines += [each.line for each in placed]
        data["experts"] = {each.name: each.as_dict() for each in placed}
    if own:
        lines.append(
            f"measured   TPOT {own.tpot_ms:.1f} ms, {own.output_tok_s:,.0f} tok/s, TTFT {own.ttft_ms:,.0f} ms, E2E {own.e2e_ms:,.0f} ms"
        )
    lines += ["", *buckets.curve_lines(lists, case, published)] if lists else []
    if buildable(row):
        lines += ["", *commands_of(row).shown()]
        data["commands"] = as_commands(row)
    misses = " and ".join(missed(prediction, asked.tpot, asked.ttft))
    refused = f"{name} does not meet the target: {misses}" if misses else ""
    return PlanResult(data, lines, chosen, lambda path: pictures.write(path, name, [(name, case, prediction)], parameters), refused)


def search_view(model: str, asked: Asked) -> PlanResult:
    """The best layouts for a model and its traffic.

    Raises:
        SpecError: an option is missing, or no layout holds the model.
    """
    parameters, question = _parameters(asked), question_of(model, asked)
    answer = search(question, parameters)
    checked = [(found, recipe.options_of(question, found, asked.max_buckets)) for found in answer.best]
    refusals = {id(found): recipe.refusal(builds) for found, builds in checked[:3]}
    legal = next(((found, builds) for found, builds in checked if not refusals.get(id(found), recipe.refusal(builds))), None)
    refused = refusal_of(question, answer, parameters) if not answer.meets else ""
    prediction = (legal or checked[0])[0].prediction
    case = (legal or checked[0])[0].candidate.case
    lists, _ = _lists(prediction, case, asked, {case.serving.max_running})
    commands = [recipe.command_of(each) for each in legal[1]] if legal else []
    serving = recipe.serve_commands(question, legal[0].candidate) if legal else []
    lines = [*_header(question, answer), "", *table_of(question, answer), "", *_near(question)]
    if legal:
        lines += ["", f"build {legal[0].candidate.label}:", *(f"  {command}" for command in (*commands, *serving)), ""]
        lines += [f"each of {legal[0].candidate.share} instances"] if legal[0].candidate.share > 1 else []
        lines += prediction_lines(prediction)
        sizes = recipe.prefill_of(legal[0].candidate, parameters)
        lines.append(f"prefill    {', '.join(map(str, sizes.buckets))} tokens a step: {100 * sizes.lost:.1f} % of its time is padding")
        lines += [
            "",
            *(buckets.curve_lines(lists, case) if lists else ["no step decodes: every answer is the token that its prompt gives"]),
        ]
    else:
        lines += ["", f"no build: {refusals[id(checked[0][0])]}"]
    data = {
        "model": question.model,
        "npus": question.npus,
        "tried": answer.tried,
        "simulated": answer.simulated,
        "meets": answer.meets,
        "best": [_as_dict(found, refusals.get(id(found))) for found in answer.best],
        "build": commands,
        "serve": "\n".join(serving) or None,
        "published": published_rows(question),
        "refused": refused,
    }
    title = f"{question.model} on {question.npus} NPUs of {question.target}"
    drawn = [(found.candidate.label, found.candidate.case, found.prediction) for found in answer.best]
    chosen = buckets.shortest(lists).buckets if lists else (case.serving.max_running,)
    return PlanResult(data, lines, chosen, lambda path: pictures.write(path, title, drawn, parameters), refused)


def question_of(model: str, asked: Asked) -> Question:
    """What the options ask.

    Raises:
        SpecError: cards or traffic are missing, an artifact is named in place of a model, or a scheme for what is quantised already.
    """
    if file_named(Path(model) / MANIFEST):
        raise SpecError(f"{model} is an artifact; legal is --artifact {model}, or the MODEL that it was built from")
    if asked.cards is None:
        raise SpecError("--cards is missing; legal is how many packages of the target there are")
    source = find(model)
    stored, schemes = stored_scheme(source), asked.quantization
    if stored and schemes:
        raise SpecError(f"--quantization {schemes[0]}: {model} is quantised already, as {stored}; legal is to leave the option out")
    quantised = (stored,) if stored else schemes or schemes_of(source.name)
    return Question(
        source.name if source.checkpoint_dir is None else model,
        shape_of(source),
        asked.target,
        asked.cards * NPUS_A_CARD[target(asked.target).name],
        workload_of(asked),
        asked.tpot,
        asked.ttft,
        tuple(quantised),
        tuple(asked.drafts) or None,
        asked.accepted,
        asked.itl_target,
        stored is not None,
    )


def workload_of(asked: Asked) -> Workload:
    """The traffic that the options describe.

    Raises:
        SpecError: neither lengths nor a trace are given, or both.
    """
    if asked.trace is not None:
        if asked.inputs is not None or asked.outputs is not None:
            raise SpecError("--trace and --input or --output; legal is one of both ways to say lengths")
        return of_trace(asked.trace, asked.concurrency)
    if asked.inputs is None or asked.outputs is None or asked.concurrency is None:
        raise SpecError("legal is --input, --output and --concurrency together, or --trace FILE")
    return of_lengths(asked.inputs, asked.outputs, asked.concurrency, asked.requests, asked.rate, asked.shared_prefix)


def with_traffic(case: LoadCase, row: Deployment, asked: Asked) -> LoadCase:
    """The case of a published row with the traffic that options describe in place of its own, each part by itself.

    Raises:
        SpecError: as `workload_of`, or a request that is longer than the launch takes.
    """
    if not any((asked.inputs, asked.outputs, asked.concurrency, asked.requests, asked.rate, asked.shared_prefix, asked.trace)):
        return case
    own = case.workload
    rate = 1 / own.arrivals[1] if len(own.arrivals) > 1 else None
    published = replace(
        asked,
        inputs=asked.inputs or str(own.inputs[0]),
        outputs=asked.outputs or str(own.outputs[0]),
        concurrency=asked.concurrency or own.concurrency,
        rate=asked.rate or rate,
        shared_prefix=asked.shared_prefix or (0 if asked.inputs else own.cached),
        requests=asked.requests or (None if asked.concurrency else own.requests),
    )
    work = workload_of(asked if asked.trace else published)
    longest = max(i + o for i, o in zip(work.inputs, work.outputs, strict=True))
    most = max((phase.context_len or 0 for phase in row.phases.values()), default=0)
    if 0 < most < longest:
        raise SpecError(f"a request of {longest} tokens with --deployment {row.id}, whose launch takes {most}; legal is a shorter one")
    return replace(case, workload=work)


def missed(seen: RunLatencies, tpot_ms: float | None, ttft_ms: float | None) -> list[str]:
    """Targets that latencies miss, with both sides."""
    pairs = (("TPOT", tpot_ms, seen.tpot_ms.mean), ("TTFT", ttft_ms, seen.ttft_ms.mean))
    return [f"{name} {got:,.1f} ms (asked: {asked:g})" for name, asked, got in pairs if asked is not None and got > asked]


def refusal_of(question: Question, answer: PlanAnswer, parameters: PlanParameters) -> str:
    """Which target nothing meets, what comes closest, and what binds it."""
    closest = answer.best[0]
    misses = " and ".join(missed(closest.prediction, question.tpot_ms, question.ttft_ms))
    binds = f"What binds it is {closest.prediction.binding}: {closest.prediction.why}. {_advice(question, closest, parameters)}"
    return f"none of {answer.tried} layouts meets the target; closest is {closest.candidate.label} with {misses}. {binds}"


def _advice(question: Question, closest: Found, parameters: PlanParameters) -> str:
    """What would come nearer: fewer requests, if one alone is fast enough."""
    case = closest.candidate.case
    alone = float(buckets.step_seconds(case, case.workload.mean_input, parameters)(np.ones(1))[0]) * 1e3 / case.accepted
    if question.tpot_ms is not None and alone > question.tpot_ms:
        return f"One request alone takes {alone:.1f} ms a token on it: legal is a target above that"
    if closest.prediction.binding == "memory":
        return "Narrower weights, fewer or shorter requests, or more cards would come nearer"
    fewer = max(int(question.workload.concurrency / excess(question, closest)), 1)
    return f"One request alone takes {alone:.1f} ms a token; about {fewer} requests in flight, or more cards, would come nearer"


def prediction_lines(prediction: Prediction) -> list[str]:
    """A prediction as text."""
    (low, high), (less, more) = prediction.interval["tpot_ms"], prediction.interval["output_tok_s"]
    lines = [
        f"predicted  TPOT {prediction.tpot_ms.mean:.1f} ms ({low:.1f} to {high:.1f}), {prediction.output_tok_s:,.0f} tok/s "
        f"({less:,.0f} to {more:,.0f}), TTFT {prediction.ttft_ms.mean:,.0f} ms, E2E {prediction.e2e_ms.mean:,.0f} ms",
        *latency_lines(prediction.itl_ms, prediction.priority_ttft_ms),
        f"binds      {prediction.binding}: {prediction.why}",
    ]
    shown = [f"{name} {part:.1f}" for name, part in prediction.parts_ms.items() if part >= 0.05]
    lines += [f"a token    {', '.join(shown)} ms; a step {prediction.step_ms:.1f} ms"] if shown else []
    lines.append("memory     " + ", ".join(f"{name} {part:.1f}" for name, part in prediction.memory.items() if part >= 0.05) + " GiB")
    return [*lines, *(f"assumed    {text}" for text in prediction.assumed)]


def latency_lines(itl_ms: LatencySpread, priority_ttft_ms: Mapping[int, LatencySpread]) -> list[str]:
    """Gaps between deliveries, and first tokens by priority where there are several, as text."""
    lines = [f"gaps       {itl_ms.median:.1f} ms in the median, {itl_ms.p95:.1f} for 95 %, {itl_ms.p99:.1f} for 99 %"]
    for level, ttft in priority_ttft_ms.items():
        lines.append(f"priority   {level}: TTFT {ttft.mean:,.0f} ms, {ttft.median:,.0f} in the median, {ttft.p99:,.0f} for 99 %")
    return lines


def table_of(question: Question, answer: PlanAnswer) -> list[str]:
    """A line for each of the best layouts."""
    width = max(len(found.candidate.label) for found in answer.best)
    targeted = question.tpot_ms is not None or question.ttft_ms is not None
    lines = [f"{'':3} {'layout':{width}} {'tok/s':>8} {'TPOT':>7} {'TTFT':>9} {'GiB':>5}  why"]
    for place, found in enumerate(answer.best, start=1):
        prediction = found.prediction
        used = sum(part for name, part in prediction.memory.items() if name != "rest")
        met = f"{excess(question, found):.2f} times the target" if not found.meets else "meets the target" if targeted else "no target"
        lines.append(
            f"{place:3} {found.candidate.label:{width}} {found.output_tok_s:8,.0f} {prediction.tpot_ms.mean:7.1f} "
            f"{prediction.ttft_ms.mean:9,.0f} {used:5.1f}  {met}; {prediction.binding}: {prediction.why}"
        )
    return lines


def published_rows(question: Question) -> list[dict[str, Any]]:
    """Published rows of the same model, target and number of NPUs, those of the same lengths first."""
    work = question.workload
    rows = [r for r in deployments().values() if (r.model, r.target, r.npus) == (question.model, question.target, question.npus)]
    rows = [row for row in rows if row.input_len is not None]
    rows.sort(key=lambda row: abs((row.input_len or 0) - work.mean_input) + abs((row.output_len or 0) - work.mean_output))
    return [
        {
            "id": row.id,
            "input": row.input_len,
            "output": row.output_len,
            "concurrency": row.concurrency,
            "target_tpot_ms": row.tpot_target_ms,
            "measured": vars(measured()[row.id]) if row.id in measured() else None,
        }
        for row in rows[:3]
    ]


def _header(question: Question, answer: PlanAnswer) -> list[str]:
    work = question.workload
    sizes = (
        f"{work.mean_input:,.0f} tokens in, {work.mean_output:,.0f} out on average, {work.concurrency} in flight, {work.requests} requests"
    )
    regime = (
        "" if work.requests > work.concurrency else "; all prompts come at once: with more requests, prefill is part of every token's time"
    )
    return [
        f"{question.model} on {question.npus} NPUs of {question.target}: {sizes}{regime}",
        f"{answer.tried} layouts tried, the {answer.simulated} that an estimate puts first simulated",
    ]


def _near(question: Question) -> list[str]:
    lines = []
    for row in published_rows(question):
        own = row["measured"]
        text = f"TPOT {own['tpot_ms']:.1f} ms, {own['output_tok_s']:,.0f} tok/s measured" if own else "no measurement published"
        goal = f", target {row['target_tpot_ms']} ms" if row["target_tpot_ms"] else ""
        lines.append(f"published  {row['id']}: {row['input']} in, {row['output']} out, {row['concurrency']} in flight{goal}: {text}")
    return lines or ["published  no deployment of this model on as many NPUs"]


def _as_dict(found: Found, refusal: str | None) -> dict[str, Any]:
    candidate = found.candidate
    return {
        "layout": candidate.label,
        "output_tok_s": found.output_tok_s,
        "meets": found.meets,
        "predicted": found.prediction.as_dict(),
        "instances": candidate.share,
        "refused_by_build": refusal,
    }


def _lists(
    prediction: Prediction, case: LoadCase, asked: Asked, always: Collection[int] = ()
) -> tuple[list[buckets.BucketList], buckets.BucketList | None]:
    """The curve of bucket lists, and the published list beside it."""
    steps: Mapping[int, float] = prediction.trace.steps
    if asked.metrics:
        steps = buckets.of_metrics(_read(asked.metrics))
    if not any(steps.values()):
        return [], None
    seconds = buckets.step_seconds(case, buckets.middle(prediction, case), _parameters(asked))
    published = buckets.evaluate(case.decode.buckets, steps, seconds) if case.decode.buckets else None
    return buckets.best_lists(steps, seconds, asked.max_buckets, always), published


def _read(place: str) -> str:
    """The text of a file or of a URL."""
    if "://" not in place:
        if not (path := file_named(place)):
            raise SpecError(f"--metrics {place}: no such file; legal is a file, or the URL of a server's /metrics")
        return path.read_text(encoding="utf-8")
    try:
        with urllib.request.urlopen(place, timeout=10.0) as response:
            return str(response.read().decode())
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        raise SpecError(f"--metrics {place}: {error}") from None


def _parameters(asked: Asked) -> PlanParameters:
    return fitted(asked.file or FILE)
