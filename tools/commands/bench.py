"""`npucompile bench`: measures builds, load time, steps and throughput on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click
import torch

from ...graphs.errors import SpecError
from ..bench import machine as bench_machine
from ..bench.figures import FIGURES, SLOW, BenchSettings, measure
from ..bench.report import as_data, as_markdown, as_text
from ..bench.streams import StreamLoad
from ..cli import Home
from ..progress import Progress
from .family_option import family_option

BUSY = 0.5
"""Load average above which a warning is printed."""


PEERS = "llama.cpp, openvino, vllm, transformers, llama.cpp-q8_0, openvino-int8"
DEFAULT_PEERS = "llama.cpp, openvino, vllm, transformers"
"""Names of engines that tools/lab/peers/engines.py knows, for the help, which needs no laboratory."""

GONE = {
    "peer": "`--peer transformers` measures it among the others",
    "kernels": "docs/lab/cpu.md has what it measured",
    "overhead": "docs/lab/server.md has what it measured, and streams measure what the host adds to a step",
}
"""Figures that this command had, and what there is in their place."""


@click.command("bench")
@click.argument("artifact_or_model", required=False)
@family_option
@click.option("--only", metavar="LIST", help=f"Figures: {', '.join(FIGURES)}.  [default: all but {', '.join(SLOW)}]")
@click.option("--streams", metavar="LIST", default="1,4,16", show_default=True, help="Numbers of concurrent requests.")
@click.option("--tokens", type=click.IntRange(2), default=64, show_default=True, help="Tokens each request generates.")
@click.option("--prompt-tokens", type=click.IntRange(1), default=64, show_default=True, help="Tokens of each prompt.")
@click.option("--repetitions", type=click.IntRange(1), default=20, show_default=True, help="Repetitions of a step.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Repetitions of all figures but steps and builds.")
@click.option("--builds", type=click.IntRange(1), default=1, show_default=True, help="Repetitions of a build.")
@click.option("--jobs", type=click.IntRange(1), default=2, show_default=True, help="Graphs compiled at a time.")
@click.option(
    "--prompts", type=click.Path(path_type=Path, dir_okay=False), help="Prompts for speculation, one per line.  [default: the model's own]"
)
@click.option(
    "--peer",
    "peer_names",
    multiple=True,
    metavar="NAME",
    help=f"An engine to measure beside ours, of {PEERS}; may be repeated. Without --only, peers is the only figure.  "
    f"[default: {DEFAULT_PEERS}]",
)
@click.option(
    "--peer-python",
    multiple=True,
    metavar="NAME=PATH",
    help="Interpreter that has an engine.  [default: $NPUCOMPILE_HOME/cache/peers/NAME/bin/python, else our own, else python3]",
)
@click.option(
    "--llama-cpp", type=click.Path(path_type=Path, file_okay=False), help="Checkout of llama.cpp, whose converter writes GGUF files."
)
@click.option("--threads", type=click.IntRange(1), help="CPU threads of a step.  [default: all cores]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--markdown", is_flag=True, help="Print Markdown, as in docs/benchmarks.md.")
@click.pass_obj
def command(
    home: Home,
    artifact_or_model: str | None,
    family: str | None,
    only: str | None,
    streams: str,
    tokens: int,
    prompt_tokens: int,
    repetitions: int,
    rounds: int,
    builds: int,
    jobs: int,
    prompts: Path | None,
    peer_names: tuple[str, ...],
    peer_python: tuple[str, ...],
    llama_cpp: Path | None,
    threads: int | None,
    as_json: bool,
    markdown: bool,
) -> None:
    """Measure ARTIFACT_OR_MODEL, by default the newest artifact. A model that is not built yet is built first.

    `npucompile bench serve` instead sends a load to a server that runs, and `bench host` measures what surrounds a device. peers
    compares speed, start and memory with other engines, each in a process and a Python environment of its own.

    Every figure is a median with its smallest and largest value, and candidates that are compared run alternately. Other work on
    the machine still shows, so measure on a quiet one. Progress goes to standard error.

    \b
    Examples: npucompile bench qwen3.5-tiny --only decode,prefill
              npucompile bench qwen3.5-tiny --only streams --streams 1,8 --markdown
              npucompile bench OUT --peer llama.cpp --peer-python llama.cpp=VENV/bin/python --llama-cpp CHECKOUT --prompt-tokens 512
    """
    if as_json and markdown:
        raise SpecError("give at most one of --json and --markdown")
    if threads:
        torch.set_num_threads(threads)
    wanted = figure_names(only) if only is not None else ("peers",) if peer_names else None
    if (peer_names or peer_python or llama_cpp) and (wanted is None or "peers" not in wanted):
        raise SpecError("--peer, --peer-python and --llama-cpp are for peers; name it in --only, or leave them out")
    loads = tuple(StreamLoad(n, prompt_tokens, tokens) for n in counts(streams))
    settings = BenchSettings(loads, repetitions, rounds, builds, jobs, prompts, peer_names, peer_python, llama_cpp)
    progress = Progress()
    machine = bench_machine.describe()
    if machine.load > BUSY:
        progress.say(f"the load average is {machine.load:.1f}: other processes will distort the figures")
    subject, tables = measure(home, artifact_or_model, wanted, settings, progress, family)
    if as_json:
        report = {"isa": machine.isa, "machine": asdict(machine), "subject": subject, "figures": [as_data(table) for table in tables]}
        click.echo(json.dumps(report, indent=1))
        return
    heading = [*bench_machine.lines(machine), ", ".join(f"{name} {value}" for name, value in subject.items())]
    draw, end = (as_markdown, "  ") if markdown else (as_text, "")
    click.echo("\n".join(line + end for line in heading))
    for table in tables:
        click.echo("\n" + draw(table), nl=False)


def figure_names(text: str) -> tuple[str, ...]:
    """Reads a list like `decode,peers`; returns the figures in the order of FIGURES.

    Raises:
        SpecError: on anything else.
    """
    words = [word.strip() for word in text.split(",")]
    if gone := [word for word in words if word in GONE]:
        raise SpecError(f"--only {gone[0]} is gone: {GONE[gone[0]]}; legal is a comma-separated list of {', '.join(FIGURES)}")
    if unknown := [word for word in words if word not in FIGURES]:
        raise SpecError(f"--only has {unknown[0]!r}; legal is a comma-separated list of {', '.join(FIGURES)}")
    return tuple(figure for figure in FIGURES if figure in words)


def counts(text: str) -> tuple[int, ...]:
    """Reads a list like `1,4,16`.

    Raises:
        SpecError: on anything else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and int(part) for part in parts):
        raise SpecError(f"--streams is {text!r}; legal is a comma-separated list of integers of at least 1, as in 1,4,16")
    return tuple(map(int, parts))
