"""The `npucompile build` command of a candidate, and what a build says to it before it traces anything."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence

from ....graphs.errors import NpucompileError
from ....graphs.types import Mesh
from ....models.presets import DRAFT_PRESETS
from ....models.registry import find
from ...builder.fit import FREE_SHARE
from ...builder.memory import GIB
from ...builder.plan import Options, plan
from ...builder.targets import target
from ...notation import PrefillSize, format_buckets, format_prefill
from ...serve.lines import Server, alike, paired
from .buckets import BucketList, build_list, prefill_sizes
from .candidates import Candidate, Question
from .parameters import PlanParameters, fitted
from .prefill import prefill_time
from .search import Found
from .system import PlannedLayout, PlannedServing, Workload

MOST_BUCKETS = 16
"""Decode buckets of a build; published rows have 1 to 17."""
MOST_PREFILL = 3
"""Prefill sizes of one prompt; each is a graph that takes a build twice as long as one of decoding."""
_PAGE = 128


def options_of(question: Question, found: Found, most_buckets: int = MOST_BUCKETS) -> list[Options]:
    """Options of the builds of a candidate: one, or one for each phase where prefill has instances of its own."""
    candidate, work = found.candidate, found.candidate.case.workload
    system, serving = candidate.case.decode, candidate.case.serving
    longest = max(i + o for i, o in zip(work.inputs, work.outputs, strict=True))
    length = -(-(longest + 2 * system.candidates) // _PAGE) * _PAGE
    common = {
        "max_model_len": length,
        "target": question.target,
        "quantization": None if question.stored else "none" if candidate.scheme == "bf16" else candidate.scheme,
        "num_speculative_tokens": system.drafts,
        "draft_model": _draft_model(question, system.drafts),
        "deployment": candidate.deployment or None,
    }
    mesh = f"dp={system.layout.dp},tp={system.layout.tp}"
    decode = {
        "mesh": mesh,
        "buckets": build_list(found.prediction, candidate.case, most_buckets),
        "max_num_seqs": serving.max_running,
    }
    if candidate.case.prefill is None:
        return [Options(question.model, prefill=_prefill(candidate), **common, **decode)]  # type: ignore[arg-type]
    layout = candidate.case.prefill.layout
    running = candidate.case.prefill_serving.max_running if candidate.case.prefill_serving else 1
    first = {"mesh": f"dp={layout.dp},tp={layout.tp}", "max_num_seqs": running, "prefill": _prefill(candidate)}
    return [
        Options(question.model, phase="prefill", **common, **first),  # type: ignore[arg-type]
        Options(question.model, phase="decode", **common, **decode),  # type: ignore[arg-type]
    ]


def prefill_of(candidate: Candidate, parameters: PlanParameters | None = None) -> BucketList:
    """Sizes for one prompt: the candidate's chunk, and the smaller ones that lose least to the padding of what is left of prompts."""
    system = candidate.case.prefill or candidate.case.decode
    seconds = prefill_time(system, parameters or fitted())
    groups = system.layout.dp
    return prefill_sizes(
        Counter(candidate.case.workload.inputs),
        lambda tokens: seconds(1, groups, tokens, 0),
        candidate.chunk,
        MOST_PREFILL,
        largest=candidate.chunk,
    )


def _prefill(candidate: Candidate) -> tuple[PrefillSize, ...]:
    sizes = [PrefillSize(tokens) for tokens in prefill_of(candidate).buckets]
    return (*sizes, PrefillSize(candidate.chunk, candidate.prompts)) if candidate.prompts > 1 else tuple(sizes)


def _draft_model(question: Question, drafts: int) -> str | None:
    if not drafts or find(question.model).has_draft_head:
        return None
    return next((name for name, preset in DRAFT_PRESETS.items() if preset["target"] == question.model), None)


def arguments(options: Options) -> list[str]:
    """The words after `npucompile build`."""
    words = [options.model]
    named = {
        "deployment": options.deployment,
        "phase": options.phase,
        "target": options.target,
        "mesh": options.mesh,
        "quantization": options.quantization,
        "buckets": format_buckets(options.buckets) if options.buckets else None,
        "prefill": format_prefill(options.prefill) if options.prefill else None,
        "max-model-len": options.max_model_len,
        "max-num-seqs": options.max_num_seqs,
        "speculative-tokens": options.num_speculative_tokens if options.draft_model or options.num_speculative_tokens is not None else None,
        "draft-model": options.draft_model,
    }
    for name, value in named.items():
        if value is not None:
            words += [f"--{name}", str(value)]
    return words


def command_of(options: Options) -> str:
    """The command line."""
    return "npucompile build " + shlex.join(arguments(options))


def serve_command(subject: str, serving: PlannedServing, work: Workload) -> str:
    """The command line of the server that was simulated.

    Args:
        subject: the artifact, or the model of a build.
    """
    return Server(subject, options=(_serve_options(serving, work),)).lines()[0]


def serve_commands(question: Question, candidate: Candidate) -> list[str]:
    """The command lines of all servers of a candidate's builds, a machine each; of one instance where it has several that are alike."""
    case = candidate.case
    options = _serve_options(case.serving, question.workload)
    decode = target(question.target).nodes(_mesh(case.decode.layout))
    if case.prefill is None:
        servers = list(alike(question.model, "mixed", decode, 1, options))
    else:
        layout = case.prefill.layout
        prefill = target(question.target).nodes(_mesh(layout))
        name = question.model.rstrip("/").rpartition("/")[2]
        servers = [*alike(f"{name}-prefill", "prefill", prefill, layout.instances), *alike(f"{name}-decode", "decode", decode, 1, options)]
    return [line for server in paired(servers) for line in server.lines()]


def _mesh(layout: PlannedLayout) -> Mesh:
    return Mesh.parse(f"dp={layout.dp},tp={layout.tp}")


def _serve_options(serving: PlannedServing, work: Workload) -> tuple[str, ...]:
    words = list[str]()
    if serving.itl_target_ms is not None:
        words += ["--itl-target", f"{serving.itl_target_ms:g}"]
    if (most_urgent := min(work.priorities, default=0)) < 0:
        words += ["--min-priority", str(most_urgent)]
    return tuple(words)


def refusal(every: Sequence[Options]) -> str:
    """What a build's plan says against the options; "" if nothing."""
    try:
        for options in every:
            planned = plan(options)
            memory = planned.target.memory_bytes(planned.mesh)
            held = planned.params_bytes + planned.state_bytes + planned.target.reserved_bytes(planned.mesh)
            if held > memory - memory // FREE_SHARE:
                parts = f"weights, pools and runtime take {held / GIB:.1f} GiB of a rank's {memory / GIB:.0f}"
                return f"{parts}: less than 1/{FREE_SHARE} is left for activations"
    except NpucompileError as error:
        return str(error)
    return ""
