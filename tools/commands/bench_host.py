"""`npucompile bench host`: how many streams this machine's host carries beside a device of a fixed step time."""

from __future__ import annotations

import json
from typing import Any

import click

from ...server.siblings.ids import MOST_DOORS
from ..bench.host import HostLoad, measure
from ..cli import Home
from ..progress import Progress


@click.command("bench host")
@click.option("--streams", type=click.IntRange(1), default=64, show_default=True, help="Streams at once.")
@click.option("--groups", type=click.IntRange(1), default=1, show_default=True, help="dp groups that they are divided among.")
@click.option(
    "--step-ms", type=click.FloatRange(0, min_open=True), default=30.0, show_default=True, help="What a step of the device takes."
)
@click.option("--tokens", type=click.IntRange(32), default=200, show_default=True, help="Tokens that each stream generates.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Repetitions; figures are medians.")
@click.option("--api-servers", type=click.IntRange(0, MOST_DOORS), default=0, show_default=True, help="As of serve.")
@click.option("--http", is_flag=True, help="Streams over HTTP, a connection each, in place of websockets.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def command(home: Home, /, rounds: int, api_servers: int, http: bool, as_json: bool, **load: Any) -> None:
    """Measure the host's part of serving: the whole server beside a device that takes a fixed time a step, and no processor.

    A device that is busy 0.9 of the time waits a tenth of it for the host. The client is a process on the same machine, which needs a
    core, too. Progress goes to standard error.

    \b
    Example: npucompile bench host --groups 8 --streams 512 --step-ms 30 --api-servers 1
    """
    found = measure(HostLoad(**load), rounds, api_servers, home.cache, home.environment, Progress(), http=http)
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    for name, unit in (
        ("median_step_ms", "ms"),
        ("device_busy", ""),
        ("tok_s", "tok/s"),
        ("engine_ms_a_step", "ms"),
        ("door_ms_a_step", "ms"),
        ("door_us_a_token", "us"),
    ):
        low, high = found["ranges"][name]
        click.echo(f"{name:18} {found[name]:10,.2f} {unit:6} ({low:,.2f}..{high:,.2f})")
