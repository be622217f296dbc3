"""Measures build times: with nothing cached, with warm compiler caches, and with nothing changed."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ...graphs.errors import NpucompileError
from ..builder import driver as building
from ..builder import plan as planning
from ..builder.settings.table import SETTINGS
from ..progress import Progress
from .report import Column, ReportTable, Value
from .stats import spread

KINDS = ("cold", "warm", "again")
"""In the order of measurement: nothing cached; a new artifact with the caches of the first; that artifact again."""

COLUMNS = (
    Column("what", "what"),
    Column("cold_s", "cold cache s", 1),
    Column("warm_s", "warm cache s", 1),
    Column("again_s", "nothing changed s", 1),
)

TOTALS = {"ready_s": "can serve (traced, uncompiled)", "build_s": "whole build", "process_s": "whole command, imports included"}

Launch = Callable[[Sequence[str]], str]


def options(arguments: Sequence[str]) -> planning.Options:
    """The options that arguments of `npucompile build` set.

    Raises:
        click.UsageError: the arguments are not legal.
    """

    def read(**given: Any) -> Any:
        return planning.Options(**given)

    for setting in SETTINGS:
        read = setting.as_decorator()(read)
    command = click.command()(click.argument("model")(click.option("--decided-by")(read)))
    read_options: planning.Options = command.main(list(arguments), standalone_mode=False)
    return read_options


def one(out: Path, cache_dir: Path, jobs: int, arguments: Sequence[str]) -> dict[str, Any]:
    """Builds once, in this process.

    Returns:
        `build_s`, `ready_s`, and `compiled`: seconds by bucket name.

    Raises:
        NpucompileError: naming what cannot be built.
    """
    report = building.build(planning.plan(options(arguments)), out, cache_dir, Progress(), jobs=jobs)
    return {"build_s": report.seconds, "ready_s": report.ready_seconds, "compiled": dict(report.compiled)}


def build(
    arguments: Sequence[str],
    *,
    jobs: int,
    rounds: int,
    environment: Mapping[str, str],
    progress: Progress,
    launch: Launch | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> ReportTable:
    """Builds cold, warm and again, each in a fresh process, within a temporary directory.

    Args:
        arguments: of `npucompile build`: model and options.
        jobs: processes that compile at a time.
        launch: replaces the start of processes in tests.

    Raises:
        NpucompileError: a build failed; its output is on standard error.
    """
    launch = launch or (lambda words: _launch(words, environment))
    reports: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    with progress.bar("build", rounds * len(KINDS)) as bar:
        for _ in range(rounds):
            with tempfile.TemporaryDirectory(prefix="npucompile-bench-") as directory:
                for kind in KINDS:
                    out = Path(directory, "cold" if kind == "cold" else "warm")
                    began = clock()
                    report = json.loads(launch([str(out), str(Path(directory, "cache")), str(jobs), *arguments]))
                    reports[kind].append({**report, "process_s": clock() - began})
                    bar.step(f"{kind} {report['build_s']:.1f} s")
    notes = (
        f"rounds: {rounds}, each in a directory of its own, graphs compiled at a time: {jobs}; of a bucket: seconds in its compiler",
        "cold: neither compiled headers nor probes of the instruction set, but the compiler itself is in the page cache",
    )
    return ReportTable("build", "Build time", COLUMNS, tuple(table_rows(reports)), notes)


def table_rows(by_kind: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Value]]:
    """A row per compiled bucket, then the totals."""
    buckets = sorted({name for reports in by_kind.values() for report in reports for name in report["compiled"]})
    rows: list[dict[str, Value]] = []
    for name in buckets:
        times = {kind: [report["compiled"][name] for report in reports if name in report["compiled"]] for kind, reports in by_kind.items()}
        rows.append({"what": f"compile {name}", **{f"{kind}_s": spread(values) for kind, values in times.items() if values}})
    for key, text in TOTALS.items():
        rows.append({"what": text, **{f"{kind}_s": spread(report[key] for report in reports) for kind, reports in by_kind.items()}})
    return rows


def apart(out: Path, cache_dir: Path, jobs: int, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Builds in a process of its own, so that it leaves no caches or threads in the measuring process.

    Raises:
        NpucompileError: the build failed; its output is on standard error.
    """
    _launch([str(out), str(cache_dir), str(jobs), *arguments], environment)


def _launch(words: Sequence[str], environment: Mapping[str, str]) -> str:
    run = subprocess.run([sys.executable, "-m", __name__, *words], env=dict(environment), stdout=subprocess.PIPE, text=True, check=False)
    if run.returncode:
        raise NpucompileError(f"the build of {words[3]} ended with status {run.returncode}; its output is above")
    return run.stdout


def main(words: Sequence[str]) -> None:
    """Entry point of a fresh process: OUT CACHE_DIR JOBS BUILD_ARGUMENTS...; prints the times as JSON."""
    out, cache_dir, jobs, *arguments = words
    print(json.dumps(one(Path(out), Path(cache_dir), int(jobs), arguments)))


if __name__ == "__main__":
    main(sys.argv[1:])
