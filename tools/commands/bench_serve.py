"""`npucompile bench serve`: loads the websocket of a running server, and reports its latencies."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..bench.serve import elsewhere, report, session
from ..bench.serve.summary import read_objectives, summarise
from ..cli import Home
from ..progress import Progress
from ..serve.options import API_KEY_VARIABLE


def _gone(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options that are refused with the command that has them."""
    for name in elsewhere.OPTIONS:
        command = click.option(f"--{name}", hidden=True, help="Gone.")(command)
    return command


@click.command("bench serve")
@click.option("--backend", default=elsewhere.OURS, show_default=True, help="API that is spoken; others speak HTTP.")
@click.option("--base-url", help="URL of the server.  [default: http://HOST:PORT]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Host of the server.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True, help="Port of the server.")
@click.option("--api-key", help=f"Key of the server.  [default: ${API_KEY_VARIABLE}]")
@click.option("--model", help="Name of the model in requests.  [default: the first that the server lists]")
@click.option("--tokenizer", help="tokenizer.json, a directory with one, an artifact or a model.  [default: of the served model's name]")
@click.option(
    "--dataset", type=click.Choice([*session.DATASETS, *elsewhere.DATASETS]), default="random", show_default=True, help="What is sent."
)
@click.option("--dataset-path", type=click.Path(path_type=Path, dir_okay=False, exists=True), help="File of the dataset prompts.")
@click.option("--num-prompts", type=click.IntRange(1), help="Requests.  [default: random 100; prompts: all lines]")
@click.option("--random-input-len", type=click.IntRange(1), default=1024, show_default=True, help="random: tokens of a prompt.")
@click.option("--random-output-len", type=click.IntRange(1), default=128, show_default=True, help="random and prompts: tokens generated.")
@click.option("--random-range-ratio", type=float, default=0.0, show_default=True, help="random: lengths vary by this share up and down.")
@click.option("--request-rate", type=float, default="inf", show_default=True, help="Requests per second; inf sends all at once.")
@click.option(
    "--burstiness", type=float, default=1.0, show_default=True, help="1 is a Poisson process; below it bursts, above it evenness."
)
@click.option("--max-concurrency", type=click.IntRange(1), help="Most requests open at once.")
@click.option("--warmup-requests", type=click.IntRange(0), default=1, show_default=True, help="Requests before, which do not count.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of prompts and arrivals.")
@click.option("--ignore-eos", is_flag=True, help="Generate past the end of text, so that all lengths are exact.")
@click.option("--extra-body", default="{}", help="JSON object with further fields of every request, such as temperature.")
@click.option("--goodput", metavar="LIST", help="Count requests that stay within ms, as in ttft:200,tpot:50,e2el:2000.")
@click.option(
    "--json", "json_to", is_flag=False, flag_value="-", metavar="[FILE]", help="Write the report as JSON, to FILE or instead of text."
)
@_gone
@click.pass_obj
def command(home: Home, /, **given: Any) -> None:
    """Send a load to a running server and report throughput and latencies.

    Options, report lines and names in JSON are those of `vllm bench serve`, which loads servers over HTTP, ours too, and of
    `sglang.bench_serving` and guidellm. The exit status is 1 if any request failed. Requests are greedy unless --extra-body says
    otherwise.

    \b
    Examples: npucompile bench serve --random-input-len 64 --random-output-len 64 --ignore-eos --max-concurrency 16
              npucompile bench serve --dataset prompts --dataset-path prompts.txt --request-rate 4
    """
    gone = {name: given.pop(name.replace("-", "_")) for name in elsewhere.OPTIONS}
    options = session.SessionOptions(**given)
    asked = [name for name, value in gone.items() if value is not None]
    elsewhere.refuse_what_others_do(options.backend, options.dataset, asked, options.url)
    objectives = read_objectives(options.goodput) if options.goodput else None
    key = options.api_key or home.environment.get(API_KEY_VARIABLE)
    target, vocabulary, max_model_len = session.find_target(home, options, key)
    load = session.make_load(options, vocabulary)
    session.check_lengths(load, max_model_len)
    outcomes = asyncio.run(session.run(options, target, vocabulary, load, Progress()))
    summary = summarise(outcomes, objectives)
    settings = session.describe(options, target, load)
    if options.json_to:
        text = json.dumps(report.as_data(summary, settings, outcomes), indent=1)
        if options.json_to == "-":
            click.echo(text)
        else:
            Path(options.json_to).write_text(text + "\n", encoding="utf-8")
    if options.json_to != "-":
        lines = report.lines(summary, backend=options.backend, request_rate=options.request_rate, max_concurrency=options.max_concurrency)
        click.echo("\n".join(lines))
    if summary.failed:
        sys.exit(1)
