"""What `npucompile plan --artifact` shows: the simulated server of an artifact, or a bench beside its prediction."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from ...graphs.errors import SpecError
from ...graphs.paths import file_named
from ...lowering.artifact.artifact import Artifact, GraphEntry
from ..bench.prediction import ACCEPTED
from ..build.targets import target
from ..inspection.cost import step_cost
from ..notation import parse_buckets
from .artifact import serve
from .benched import Compared, compare, read_bench
from .recipe import serve_command
from .system import Serving
from .views import View, latency_lines, workload_of

PROMPT, OUTPUT = 64, 64
"""Tokens of a request of `npucompile bench`, by default."""
_HOST_S = 1e-3
"""What the host is taken to add to a step on NPUs: assumed."""


def artifact_view(path: Path, options: Mapping[str, Any]) -> View:
    """The prediction of an artifact's server.

    Raises:
        SpecError: the artifact is for CPUs and nothing was measured, or the options lack what is needed.
    """
    artifact = Artifact.open(path, check=False)
    if options["measured"] is not None:
        if options["itl_target"] is not None:
            raise SpecError("--itl-target with --measured, whose bench had none; legal is one of both")
        return _measured(artifact, options)
    if target(artifact.manifest.target).local:
        raise SpecError(
            f"{path} is for this machine, whose speed is measured: legal is --measured with what "
            "`npucompile bench --only decode,prefill,streams --json` printed"
        )
    return _estimated(artifact, options)


def _estimated(artifact: Artifact, options: Mapping[str, Any]) -> View:
    """A server on NPUs, from the operators of its graphs."""
    work = workload_of(options)

    entries = {entry.bucket.name: entry for entry in artifact.manifest.graphs}

    @functools.cache
    def step_s(bucket: str, context: int) -> float:
        return step_cost(artifact, entries[bucket], context).step_ms / 1e3

    def seconds(entry: GraphEntry, rows: int, context: int) -> float:
        return step_s(entry.bucket.name, context)

    drafts = artifact.manifest.limits.drafts
    accepted = options["accepted"] or (min(ACCEPTED, drafts + 1.0) if drafts else 1.0)
    target_ms = options["itl_target"]
    served = serve(artifact, work, seconds, lambda rows: _HOST_S, accepted, itl_target_ms=target_ms)
    command = serve_command(str(artifact.path), Serving(itl_target_ms=target_ms), work)
    data = {
        "artifact": str(artifact.path),
        "accepted": accepted,
        "predicted": {
            "tpot_ms": served.tpot_ms.mean,
            "ttft_ms": served.ttft_ms.mean,
            "e2e_ms": served.e2e_ms.mean,
            "itl_ms": served.itl_ms.as_dict(),
            "output_tok_s": served.output_tok_s,
            "priority_ttft_ms": {str(level): spread.as_dict() for level, spread in served.priority_ttft_ms.items()},
        },
        "serve": command,
    }
    lines = [
        f"{artifact.path}: {work.requests} requests, {work.concurrency} in flight, {accepted:g} tokens a step",
        f"predicted  TPOT {served.tpot_ms.mean:.1f} ms, {served.output_tok_s:,.0f} tok/s, TTFT {served.ttft_ms.mean:,.0f} ms, "
        f"E2E {served.e2e_ms.mean:,.0f} ms",
        *latency_lines(served.itl_ms, served.priority_ttft_ms),
        f"serve      {command}",
    ]
    return View(data, lines, sorted(entry.bucket.batch for entry in artifact.manifest.graphs if entry.bucket.kind == "decode"))


def _measured(artifact: Artifact, options: Mapping[str, Any]) -> View:
    """What a bench measured, beside what two of its buckets predict."""
    sizes = sorted(entry.bucket.batch for entry in artifact.manifest.graphs if entry.bucket.kind == "decode")
    file, chosen = _bench_file(options["measured"])
    fit_on = chosen or tuple(dict.fromkeys((sizes[0], sizes[-1])))
    prompt, output = (int(options[name] or default) for name, default in (("inputs", PROMPT), ("outputs", OUTPUT)))
    compared = compare(artifact, read_bench(file), fit_on, prompt, output)
    data = {
        "artifact": str(artifact.path),
        "fitted": list(fit_on),
        "rows": [{**vars(row), "error": row.error} for row in compared],
    }
    return View(data, lines_of(compared, fit_on), sizes)


def _bench_file(text: str) -> tuple[Path, tuple[int, ...]]:
    """The file of --measured, and the buckets after it; none where there are none.

    Raises:
        SpecError: there is no such file, or what follows it is no list.
    """
    path, buckets = file_named(text), ""
    if not path:
        name, _, buckets = text.rpartition(":")
        path = file_named(name or text)
    if not path:
        raise SpecError(f"--measured {text}: no such file; legal is what `npucompile bench --json` printed, as FILE or FILE:1,64")
    return path, parse_buckets(buckets) if buckets else ()


def lines_of(compared: Sequence[Compared], fit_on: Sequence[int]) -> list[str]:
    """The comparison as text."""
    lines = [f"fitted to decode buckets {','.join(map(str, fit_on))}", f"{'':28} {'measured':>10} {'predicted':>10} {'error %':>8}"]
    for row in compared:
        mark = " fitted" if row.fitted else ""
        lines.append(f"{row.what:28} {row.measured:10,.2f} {row.predicted:10,.2f} {100 * row.error:+8.1f} {row.unit}{mark}")
    for unit, what in (("ms", "steps"), ("tok/s", "throughput")):
        errors = [abs(row.error) for row in compared if row.unit == unit and not row.fitted]
        if errors:
            lines.append(
                f"{what} that nothing was fitted to: {100 * max(errors):.1f} % off at most, {100 * median(errors):.1f} % in the median"
            )
    return lines
